"""memory: where the memory of a compiled training step goes, and why what is kept for the backward is kept.

The figures are those of a dry run of the halves (`jointtrace.reporting.dry_run`). Parameters and other arguments belong
to the caller: they are listed apart, and no peak counts them.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jointtrace.errors import OptionError
from jointtrace.ir.facts import nbytes, storage
from jointtrace.ir.facts import producers as makers_of
from jointtrace.ir.memory import plan_memory
from jointtrace.ir.op import Op, Phase, Source, TensorType
from jointtrace.ir.trace import Trace
from jointtrace.passes.recompute import saved as saved_of
from jointtrace.pipeline import PASSES, in_loops
from jointtrace.reporting.dry_run import Block, DryRun, NoDryRun, Sample, run_dry
from jointtrace.reporting.reasons import readers_of, reasons_for, size
from jointtrace.runtime.record import Record

ARGUMENTS = "parameters and other arguments"
KINDS = (ARGUMENTS, "kept activations", "results", "gradients", "temporaries")
"""What holds memory. Results belong to the caller; cotangents are temporaries."""
READERS_IN_TEXT = 3
LARGEST = 5
OP_BY_OP = frozenset({"joint", *(name for name, _ in PASSES)}) - {"fuse"}  # stages that hold a joint trace of plain ops
SUFFIXES = (".html", ".png")


@dataclass(frozen=True)
class Kept:
    """A tensor that the forward keeps for the backward.

    Attributes:
        name, shape, dtype, nbytes: the tensor; the bytes are those of all its memory.
        aliases: names of other kept values in the same memory.
        made_by, source: the op that makes it, and the user's line.
        readers: the backward ops that need it.
        why: why it is not computed again instead.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    aliases: tuple[str, ...]
    made_by: str
    source: Source | None
    readers: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        more = len(self.readers) - READERS_IN_TEXT
        needed = ", ".join(self.readers[:READERS_IN_TEXT]) + (f" and {more} more" if more > 0 else "")
        also = f", also as {', '.join(self.aliases)}" if self.aliases else ""
        where = f" at {self.source}" if self.source else ""
        tensor = f"{self.name}: {self.dtype}{list(self.shape)}{also}"
        return (f"{size(self.nbytes):>10}  {tensor}, of {self.made_by}{where}\n"
                f"{'':12}needed by {needed or 'the results of the backward'}; {self.why}")


@dataclass(frozen=True)
class Step:
    """An op, or a kernel in a region, and what is alive while it runs.

    Attributes:
        phase: `fw` or `bw`.
        op: name of the op or kernel.
        source: the user's line; of a kernel that of the first op it is made from, as far as the tensors it reads tell.
        region: name of the region it runs in, else empty.
        nbytes: bytes by what holds them, in the order of `KINDS`.
        largest: the largest tensors alive, as (name, bytes).
    """

    phase: str
    op: str
    source: Source | None
    region: str
    nbytes: tuple[int, ...]
    largest: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        """Bytes alive besides the arguments."""
        return sum(self.nbytes[1:])

    def __str__(self) -> str:
        phase = "forward" if self.phase == Phase.FW.value else "backward"
        inside = f" in {self.region}" if self.region else ""
        return f"{self.op}{inside}, {phase}" + (f", {self.source}" if self.source else "")


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one compilation, forward and backward once, without what other calls leave behind.

    Attributes:
        kept: tensors kept for the backward, largest first.
        arguments: bytes by argument; what shares memory counts once.
        kept_arguments: the arguments that the backward reads: they cost nothing.
        steps: ops and kernels in the order they run.
        boundary: the first step of the backward.
        notes: what is estimated, and why; empty where all is known.
    """

    kept: tuple[Kept, ...]
    arguments: Mapping[str, int]
    kept_arguments: tuple[str, ...]
    steps: tuple[Step, ...]
    boundary: int
    notes: tuple[str, ...]

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for the backward."""
        return sum(kept.nbytes for kept in self.kept)

    @property
    def argument_bytes(self) -> int:
        """Bytes of parameters and other arguments."""
        return sum(self.arguments.values())

    @property
    def forward_bytes(self) -> int:
        """Bytes alive at the end of the forward: what is kept, and the results."""
        return self.steps[self.boundary - 1].total_bytes if self.boundary else 0

    @property
    def peak(self) -> Step | None:
        """The first step at which most is alive; None where nothing runs."""
        return max(self.steps, key=lambda step: step.total_bytes, default=None)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once besides the arguments."""
        return max((step.total_bytes for step in self.steps), default=0)

    @property
    def backward_peak_bytes(self) -> int:
        """The most bytes alive at once in the backward besides the arguments."""
        return max((step.total_bytes for step in self.steps[self.boundary:]), default=0)

    def save(self, path: str | Path) -> None:
        """Write the timeline: a picture (`.png`), or a page that shows each step under the pointer (`.html`).

        Raises:
            OptionError: the name ends in neither.
        """
        path = Path(path)
        if path.suffix not in SUFFIXES:
            raise OptionError(f"{path}: the name of a timeline ends in {' or '.join(SUFFIXES)}")
        from jointtrace.reporting import picture

        if path.suffix == ".png":
            picture.write_png(self, path)
        else:
            picture.write_page(self, path)

    def summary(self) -> Iterator[str]:
        """Yield the figures, a line each."""
        peak = self.peak
        if peak is not None:
            estimated = " (estimated)" if self.notes else ""
            yield f"peak {size(self.peak_bytes)}{estimated} at {peak}"
            yield (f"{size(self.forward_bytes)} at the end of the forward, {size(self.backward_peak_bytes)} at most in "
                   f"the backward, besides {size(self.argument_bytes)} of {ARGUMENTS}")
        yield from self.notes

    def __str__(self) -> str:
        lines = [*self.summary(), f"kept for the backward: {size(self.kept_bytes)} in {len(self.kept)} tensors"]
        lines += map(str, self.kept)
        names = ", ".join(self.kept_arguments) or "none"
        return "\n".join([*lines, f"arguments that the backward reads, at no cost: {names}"])


def memory_of(record: Record) -> MemoryReport:
    """Return the memory report of one compilation, which must have finished."""
    halves = record.halves
    if halves is None:
        return MemoryReport((), {}, (), (), 0, ("the compilation did not finish",))
    try:
        run = run_dry(halves, record.counters)
    except NoDryRun as error:
        run = _by_ops(record, str(error))
    return MemoryReport(
        tuple(_kept(record, run)), run.arguments, tuple(name for name, block in run.saved.items() if block is None),
        *_steps(run), tuple(run.notes),
    )


def _kept(record: Record, run: DryRun) -> list[Kept]:
    halves = record.halves
    assert halves is not None
    names: dict[int, list[str]] = {}
    blocks = {id(block): block for block in run.saved.values() if block is not None}
    for name, block in run.saved.items():
        if block is not None:
            names.setdefault(id(block), []).append(name)
    makers, readers, reasons = _makers(halves.forward), readers_of(halves.backward), reasons_for(record)
    rows = []
    for key, (name, *aliases) in names.items():
        maker = makers.get(name)
        read = dict.fromkeys(reader for alias in (name, *aliases) for reader in readers.get(alias, ()))
        rows.append(Kept(name, _shape(halves.forward, name), blocks[key].dtype, blocks[key].nbytes, tuple(aliases),
                         maker.target.name if maker else "the forward", maker.source if maker else None,
                         tuple(read), reasons(name)))
    return sorted(rows, key=lambda kept: -kept.nbytes)


def _shape(trace: Trace, name: str) -> tuple[int, ...]:
    kind = trace.types[name]
    return tuple(map(int, kind.shape)) if isinstance(kind, TensorType) else ()


def _makers(trace: Trace) -> dict[str, Op]:
    makers = makers_of(trace)
    for op in trace.ops:
        if op.body is not None:
            makers.update({name: inner for name, inner in makers_of(op.body).items() if name in op.outs})
    return makers


def _steps(run: DryRun) -> tuple[tuple[Step, ...], int]:
    """Return the steps of a dry run: of each op, and of each kernel, the sample with most alive."""
    chosen: list[int] = []
    boundary = 0
    for i, sample in enumerate(run.samples):
        if chosen and _is_one(run.samples[chosen[-1]], sample):
            if sample.nbytes > run.samples[chosen[-1]].nbytes:
                chosen[-1] = i
        else:
            chosen.append(i)
        boundary = len(chosen) if i < run.boundary else boundary
    return tuple(_step(run, i, alive) for i, alive in _alive(run.blocks, chosen)), boundary


def _alive(blocks: list[Block], positions: list[int]) -> Iterator[tuple[int, list[Block]]]:
    """Yield each of the rising `positions` with the blocks alive there; `blocks` are in the order they came."""
    alive: list[Block] = []
    following = 0
    for position in positions:
        while following < len(blocks) and blocks[following].first <= position:
            alive.append(blocks[following])
            following += 1
        alive = [block for block in alive if block.last >= position]
        yield position, alive


def _is_one(before: Sample, sample: Sample) -> bool:
    same = (before.phase, before.position, before.region) == (sample.phase, sample.position, sample.region)
    return same and (not sample.region or sample.label == "end of the region")


def _step(run: DryRun, position: int, alive: list[Block]) -> Step:
    sample = run.samples[position]
    held: dict[str, int] = dict.fromkeys(KINDS, 0)
    held[ARGUMENTS] = sum(run.arguments.values())
    for block in alive:
        held[block.kind] += block.nbytes
    held["temporaries"] += sample.nbytes - sum(block.nbytes for block in alive)  # what is planned and not yet code
    largest = sorted(alive, key=lambda block: -block.nbytes)[:LARGEST]
    return Step(sample.phase, sample.label, sample.source, sample.region, tuple(held.values()),
                tuple((_described(run, block), block.nbytes) for block in largest))


def _described(run: DryRun, block: Block) -> str:
    name = block.name or f"made by {run.samples[min(block.first, len(run.samples) - 1)].label}"
    return f"{name}: {block.dtype}{list(block.shape)} ({block.kind})"


def _by_ops(record: Record, reason: str) -> DryRun:
    """Return the plan of the joint trace, op by op, where a dry run is not possible."""
    trace = next(stage.trace for stage in reversed(record.stages) if stage.name in OP_BY_OP)
    executors = () if "fuse" in record.options.disable else record.executors
    plan, owner = plan_memory(trace, in_loops(trace, executors)), storage(trace)
    run = DryRun(boundary=trace.boundary, notes=[f"planned op by op, as the program cannot run dry ({reason})"])
    run.arguments = {name: nbytes(trace.types[name]) for name in trace.inputs if name in trace.types}
    run.samples = [Sample(op.phase.value, op.target.name, op.source, "", position, alive)
                   for position, (op, alive) in enumerate(zip(trace.ops, plan.alive, strict=True))]
    by_name: dict[str, Block] = {}
    for life in plan.lifetimes:
        kind = trace.types[life.name]
        dtype = str(kind.dtype).removeprefix("torch.") if isinstance(kind, TensorType) else ""
        block = Block(life.name, life.nbytes, _shape(trace, life.name), dtype, life.start,
                      min(life.end, len(trace.ops) - 1))
        by_name[life.name] = block
        run.blocks.append(block)
    names = saved_of(trace)
    run.saved = {name: by_name.get(owner[name]) for name in names}
    for kind, held in (("results", trace.output_names), ("kept activations", names), ("gradients", trace.grad_names)):
        for name in held:
            if owner[name] in by_name:
                by_name[owner[name]].kind = kind
    return run
