"""What a user calls to look into a compiled function: `jointtrace.report` and `jointtrace.dump`."""
from __future__ import annotations

from typing import Any

from jointtrace.errors import OptionError
from jointtrace.reporting.dump import text_of
from jointtrace.reporting.registry import find
from jointtrace.reporting.report import Report, report_of
from jointtrace.runtime.record import Record, records_of


def report(fn: Any) -> Report:
    """Return what compiling `fn` made: regions and calls, bytes kept for the backward, what runs eagerly and why.

    Raises:
        OptionError: `fn` was not compiled by jointtrace, or not called yet.
    """
    return Report(tuple(report_of(record) for record in _records(fn)))


def dump(fn: Any, stage: str = "joint", *, compilation: int = -1) -> str:
    """Return a trace of `fn` as text.

    Args:
        fn: a function or module compiled by jointtrace; one whose compilation failed shows the stages it reached.
        stage: `joint` (as it was built), `forward`, `backward` (as they run), `all`, or the name of a pass.
        compilation: which compilation, where there are several; the last by default.

    Raises:
        OptionError: `fn` was not compiled by jointtrace, or there is no such stage or compilation.
    """
    records = _records(fn)
    if not -len(records) <= compilation < len(records):
        raise OptionError(f"no compilation {compilation}; there are {len(records)}")
    return text_of(records[compilation], stage)


def _records(fn: Any) -> list[Record]:
    records = records_of(getattr(fn, "_lc_cs", fn)) or find(fn)  # thunder keeps the statistics of a jitted function there
    if not records:
        raise OptionError(f"{fn!r:.80} was not compiled by jointtrace: compile it with torch.compile(fn, backend="
                          '"jointtrace") or thunder.jit(fn, delay_trace_split=True) and call it first (where it was '
                          "called, Dynamo left it as it is)")
    return records
