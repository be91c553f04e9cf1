"""report: what a compilation made: regions and their calls, what the backward is left, what runs eagerly and why."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from jointtrace.ir.facts import nbytes, producers, storage
from jointtrace.ir.op import Op, Phase, Source, Tag, TensorType
from jointtrace.ir.trace import Trace
from jointtrace.pipeline import Stage
from jointtrace.regions.fuse import executor_of
from jointtrace.reporting.memory import MemoryReport, memory_of
from jointtrace.runtime.record import Origin, Record

MIB = 2**20
REASONS = (
    (Tag.OPAQUE, "nothing is known of it"),
    (Tag.COLLECTIVE, "a collective keeps its place"),
    (Tag.WAIT, "a wait keeps its place"),
    (Tag.MUTATES, "it writes in place"),
    (Tag.CLAIMED, "an executor of yours runs it"),
)


@dataclass(frozen=True)
class RegionReport:
    """A compiled region: how many ops it holds and how often it ran."""

    name: str
    executor: str
    phase: str
    ops: int
    calls: int


@dataclass(frozen=True)
class SavedReport:
    """A value kept from the forward to the backward. An input costs nothing: its owner keeps it anyway."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    is_input: bool
    made_by: str
    source: Source | None


@dataclass(frozen=True)
class EagerReport:
    """Ops that run one by one, and why."""

    target: str
    phase: str
    count: int
    reason: str


@dataclass(frozen=True)
class CompilationReport:
    """One compilation; `saved_bytes` counts each storage once and inputs not at all.

    `origin` says which part of the program it is, where Dynamo cut the program into parts.
    """

    frontend: str
    executors: tuple[str, ...]
    passes: tuple[Stage, ...]
    regions: tuple[RegionReport, ...]
    saved: tuple[SavedReport, ...]
    saved_bytes: int
    eager: tuple[EagerReport, ...]
    finished: bool
    origin: Origin | None = None
    record: Record | None = field(default=None, repr=False, compare=False)

    @cached_property
    def memory(self) -> MemoryReport | None:
        """Where the memory goes, made when it is first asked for; None where the compilation did not finish."""
        return memory_of(self.record) if self.record is not None and self.finished else None

    @property
    def ran(self) -> bool:
        """Whether any of its regions was ever called; True where it has none to count by."""
        return not self.regions or any(region.calls for region in self.regions)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclass(frozen=True)
class Report:
    """All compilations of a function, oldest first; the fields of the last one are also its own."""

    compilations: tuple[CompilationReport, ...]

    @property
    def last(self) -> CompilationReport:
        """The newest compilation."""
        return self.compilations[-1]

    @property
    def passes(self) -> tuple[Stage, ...]:
        """Passes of the newest compilation, each with `name`, `seconds` and `ops`."""
        return self.last.passes

    @property
    def regions(self) -> tuple[RegionReport, ...]:
        """Regions of the newest compilation."""
        return self.last.regions

    @property
    def saved(self) -> tuple[SavedReport, ...]:
        """What the newest compilation keeps for its backward."""
        return self.last.saved

    @property
    def saved_bytes(self) -> int:
        """Bytes that the newest compilation keeps for its backward, without inputs."""
        return self.last.saved_bytes

    @property
    def memory(self) -> MemoryReport | None:
        """Where the memory of the newest compilation goes; None where it did not finish."""
        return self.last.memory

    @property
    def eager(self) -> tuple[EagerReport, ...]:
        """What of the newest compilation runs eagerly."""
        return self.last.eager

    def __str__(self) -> str:
        if len(self.compilations) == 1:
            return str(self.last)
        return "\n\n".join(f"compilation {heading(i, c.origin)}\n{c}" for i, c in enumerate(self.compilations, 1))


def heading(number: int, origin: Origin | None) -> str:
    """Return the number of a compilation, with the part of the program it covers where there is more than one."""
    return f"{number}: {origin}" if origin else f"{number}"


def report_of(record: Record) -> CompilationReport:
    """Return the report of one compilation, finished or not."""
    halves = record.halves
    saved = _saved(record)
    by_storage: dict[str, int] = {}
    if halves is not None:
        owner = storage(halves.forward)
        for value in saved:
            if owner[value.name] not in halves.forward.inputs:
                by_storage[owner[value.name]] = max(value.nbytes, by_storage.get(owner[value.name], 0))
    return CompilationReport(
        record.frontend, tuple(ex.name for ex in record.executors), tuple(record.stages), tuple(_regions(record)),
        saved, sum(by_storage.values()), tuple(_eager(record)), halves is not None, record.origin, record,
    )


def _halves(record: Record) -> list[Trace]:
    if record.halves is None:
        return []
    return [half for half in (record.halves.forward, record.halves.backward) if half is not None]


def _regions(record: Record) -> Iterator[RegionReport]:
    calls = record.counters.calls()
    for half in _halves(record):
        for op in half.ops:
            if op.body is not None:
                yield RegionReport(op.target.name, executor_of(op), op.phase.value, len(op.body.ops),
                                   calls.get(op.target.name, 0))


def _saved(record: Record) -> tuple[SavedReport, ...]:
    if record.halves is None:
        return ()
    forward = record.halves.forward
    makers = producers(forward)
    for op in forward.ops:
        if op.body is not None:
            makers.update({name: inner for name, inner in producers(op.body).items() if name in op.outs})
    rows = []
    for name in record.halves.saved:
        kind, maker = forward.types[name], makers.get(name)
        shape = tuple(map(int, kind.shape)) if isinstance(kind, TensorType) else ()
        dtype = str(kind.dtype).removeprefix("torch.") if isinstance(kind, TensorType) else type(kind).__name__
        rows.append(SavedReport(name, shape, dtype, nbytes(kind), name in forward.inputs,
                                maker.target.name if maker else "input", maker.source if maker else None))
    return tuple(rows)


def _eager(record: Record) -> Iterator[EagerReport]:
    counts: Counter[tuple[str, Phase, str]] = Counter()
    for half in _halves(record):
        for op in half.ops:
            if op.body is None:
                counts[op.target.name, op.phase, _reason(op, half, record)] += 1
    for (target, phase, reason), count in counts.items():
        yield EagerReport(target, phase.value, count, reason)


def _reason(op: Op, half: Trace, record: Record) -> str:
    for tag, reason in REASONS:
        if tag in op.tags:
            return reason
    fusing = [ex for ex in record.executors if ex.fuses]
    if not fusing or "fuse" in record.options.disable:
        return "no executor that fuses was asked"
    if any(ex.can_run(op, half.types) for ex in fusing):
        return "it is too little to compile"
    return f"{' and '.join(ex.name for ex in fusing)} cannot run it"


def _lines(c: CompilationReport) -> Iterator[str]:
    state = "" if c.finished else " (did not finish)"
    state += "" if c.ran else " (NEVER RAN: none of its regions was called)"
    yield f"jointtrace, {c.frontend} front end, executors: {', '.join(c.executors)}{state}"
    yield "passes    " + ", ".join(f"{p.name} {p.seconds * 1e3:.0f} ms ({p.ops} ops)" for p in c.passes)
    for r in c.regions:
        never = "" if r.calls else "  NEVER RAN"
        yield f"region    {r.name}: {r.ops} ops, {r.calls} calls{never}"
    kept = [s for s in c.saved if not s.is_input]
    yield f"saved     {c.saved_bytes / MIB:.2f} MiB in {len(kept)} values (and {len(c.saved) - len(kept)} inputs)"
    for s in sorted(kept, key=lambda s: -s.nbytes):
        where = f"  {s.source}" if s.source else ""
        yield f"  {s.nbytes / MIB:9.3f} MiB  {s.name}: {s.dtype}{list(s.shape)}  {s.made_by}{where}"
    for i, line in enumerate(c.memory.summary() if c.memory is not None else ()):
        yield f"{'' if i else 'memory':<10}{line}"
    for e in c.eager:
        yield f"eager     {e.count} x {e.target} ({e.phase}): {e.reason}"
