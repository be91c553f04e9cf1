"""Record: what became of one compilation; reports and dumps read it, front ends write it.

What thunder compiled carries its records, oldest first, under the attribute `RECORDS`; those of torch.compile live as
long as the code that Dynamo holds (`jointtrace.reporting.registry`).
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


@dataclass(frozen=True)
class Origin:
    """Which part of the user's program one compilation of Dynamo covers.

    Attributes:
        compile_id: Dynamo's own number for it, as `1/0`.
        function: name of the function.
        place: where it begins, as `model.py:12`.
        resumed: whether that is where it goes on after a graph break.
        ends: the graph break that it goes up to, and why there is one; empty where it goes to the end.
        again: why it was compiled once more; empty for the first time.
    """

    compile_id: str
    function: str
    place: str
    resumed: bool = False
    ends: str = ""
    again: str = ""

    def __str__(self) -> str:
        where = f"from {self.place} on" if self.resumed else f"({self.place})"
        text = f"[{self.compile_id}] {self.function} {where}"
        text += f", up to the graph break at {self.ends}" if self.ends else ""
        return text + (f"; compiled again: {self.again}" if self.again else "")


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
        written: positions of the outputs that are arguments with a new gradient history.
        depends: for each gradient the output positions it is computed from.
        counters: calls of each region.
        folder: where its stages are written, if anywhere.
        origin: which part of the program it covers, where Dynamo cut the program into parts.
    """

    frontend: str
    options: Options
    executors: tuple[Executor, ...]
    stages: list[Stage] = field(default_factory=list)
    halves: Halves | None = None
    differentiable: tuple[bool, ...] = ()
    written: frozenset[int] = frozenset()
    depends: tuple[frozenset[int], ...] = ()
    counters: Counters = field(default_factory=Counters)
    folder: Path | None = None
    origin: Origin | None = None


def add_record(owner: Any, record: Record) -> None:
    """Attach `record` to a compiled object."""
    owner.__dict__.setdefault(RECORDS, []).append(record)


def records_of(owner: Any) -> list[Record]:
    """Return the records attached to a compiled object, oldest first."""
    return getattr(owner, RECORDS, [])
