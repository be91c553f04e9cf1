"""Record: what became of one compilation; reports and dumps read it, front ends write it.

A compiled object carries its records, oldest first, under the attribute `RECORDS`.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jointtrace.runtime.counters import Counters
from jointtrace.runtime.split import Halves

if TYPE_CHECKING:
    from pathlib import Path

    from jointtrace.executors.base import Executor
    from jointtrace.options import Options
    from jointtrace.pipeline import Stage

RECORDS = "_jointtrace_records"


@dataclass
class Record:
    """One compilation.

    Attributes:
        frontend: `thunder` or `dynamo`.
        options: what it was compiled with.
        executors: the executors asked, in order.
        stages: the traces so far, each with the seconds its pass took; complete up to a failure.
        halves: the halves as they run, None until the compilation succeeded.
        differentiable: for each output whether a gradient flows into it.
        depends: for each gradient the output positions it is computed from.
        counters: calls of each region.
        folder: where its stages are written, if anywhere.
    """

    frontend: str
    options: Options
    executors: tuple[Executor, ...]
    stages: list[Stage] = field(default_factory=list)
    halves: Halves | None = None
    differentiable: tuple[bool, ...] = ()
    depends: tuple[frozenset[int], ...] = ()
    counters: Counters = field(default_factory=Counters)
    folder: Path | None = None


def add_record(owner: Any, record: Record) -> None:
    """Attach `record` to a compiled object."""
    owner.__dict__.setdefault(RECORDS, []).append(record)


def records_of(owner: Any) -> list[Record]:
    """Return the records attached to a compiled object, oldest first."""
    return getattr(owner, RECORDS, [])
