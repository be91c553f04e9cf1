"""What a user calls to look into a compiled function: `jointtrace.report` and `jointtrace.dump`."""
from __future__ import annotations

from typing import Any

from jointtrace.errors import OptionError
from jointtrace.reporting.dump import text_of
from jointtrace.reporting.registry import find
from jointtrace.reporting.report import Report, heading, report_of
from jointtrace.runtime.record import Record, records_of


def report(fn: Any) -> Report:
    """Return what compiling `fn` made: regions and calls, bytes kept for the backward, what runs eagerly and why.

    Raises:
        OptionError: `fn` was not compiled by jointtrace, or not called yet.
    """
    return Report(tuple(report_of(record) for record in _records(fn)))


def dump(fn: Any, stage: str = "joint", *, compilation: int | None = -1) -> str:
    """Return a trace of `fn` as text.

    What is compiled part by part (torch.compile, around graph breaks) or again (for other shapes) has several
    compilations, numbered as in the report but from 0.

    Args:
        fn: a function or module compiled by jointtrace; one whose compilation failed shows the stages it reached.
        stage: `joint` (as it was built), `forward`, `backward` (as they run), `all`, or the name of a pass.
        compilation: which one, the last by default; None: each in turn, below a comment that says which it is.

    Raises:
        OptionError: `fn` was not compiled by jointtrace, or there is no such stage or compilation.
    """
    records = _records(fn)
    if compilation is None:
        return "\n".join(f"# compilation {heading(i, r.origin)}\n{text_of(r, stage)}" for i, r in enumerate(records))
    if not -len(records) <= compilation < len(records):
        raise OptionError(f"no compilation {compilation}; there are {len(records)}")
    return text_of(records[compilation], stage)


def _records(fn: Any) -> list[Record]:
    statistics = getattr(fn, "_lc_cs", fn)  # thunder's, of a jitted function
    records = records_of(statistics) or find(fn)
    if not records:
        raise OptionError(f"{fn!r:.80} was not compiled by jointtrace, or has not been called yet; compile it with "
                          'torch.compile(fn, backend="jointtrace") or thunder.jit(fn, delay_trace_split=True) and call '
                          "it first (where it was called, Dynamo left all of it to Python)")
    return records
