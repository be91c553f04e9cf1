"""memory: the bytes alive while each op of a joint trace runs, and what holds them.

The plan follows the order of the ops: a value lives from the op that makes it to its last reader. Inputs belong to the
caller and do not count. What only passes from one op of a compiled loop to the next never becomes memory; what such an
op reads lives until the loop that uses the result has run.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from jointtrace.ir.facts import SHARING, nbytes, numel, storage
from jointtrace.ir.op import Op, Tag
from jointtrace.ir.trace import Trace

Fused = Callable[[Op], bool]


@dataclass(frozen=True)
class Lifetime:
    """A piece of memory: the value that names it, its bytes, the first and the last op during which it is alive."""

    name: str
    nbytes: int
    start: int
    end: int


@dataclass(frozen=True)
class MemoryPlan:
    """Lifetimes in trace order, and the bytes alive during each op."""

    lifetimes: tuple[Lifetime, ...]
    alive: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return max(self.alive, default=0)

    @property
    def peak(self) -> int:
        """Position of the first op during which most bytes are alive."""
        return max(range(len(self.alive)), key=self.alive.__getitem__, default=0)


def plan_memory(trace: Trace, fused: Fused) -> MemoryPlan:
    """Return the memory plan of a joint trace; `fused` says of an op whether it runs inside a compiled loop."""
    owner = storage(trace)
    lifetimes = []
    ends = _ends(trace, owner, fused)
    for position, op in enumerate(trace.ops):
        for name in op.outs:
            if owner[name] == name and (end := ends.get(name)) is not None:
                lifetimes.append(Lifetime(name, nbytes(trace.types[name]), position, max(end, position)))
    return MemoryPlan(tuple(lifetimes), alive_bytes(lifetimes, len(trace.ops)))


def alive_bytes(lifetimes: list[Lifetime], length: int) -> tuple[int, ...]:
    """Return for each of `length` positions the bytes alive."""
    change = [0] * (length + 1)
    for life in lifetimes:
        change[life.start] += life.nbytes
        change[min(life.end, length - 1) + 1] -= life.nbytes
    return tuple(accumulate(change[:length]))


def in_loop(op: Op, fused: Fused) -> bool:
    """Whether `op` runs inside a compiled loop, which passes its result on without memory where all readers do, too."""
    return Tag.COMPUTE_BOUND not in op.tags and fused(op)


def _ends(trace: Trace, owner: dict[str, str], fused: Fused) -> dict[str, int]:
    """Return the last position at which each piece of memory is read; without those that never become memory."""
    after = len(trace.ops)
    ends = {owner[name]: after for name in (*trace.output_names, *trace.grad_names)}
    real = set(ends)
    phase = {name: op.phase for op in trace.ops for name in op.outs if owner[name] == name}
    for position, op in zip(range(after - 1, -1, -1), reversed(trace.ops), strict=True):
        if op.tags & SHARING:  # reads of its result are reads of what it shares
            continue
        loop = in_loop(op, fused)
        memory = [owner[name] for name in op.outs]
        if not loop or _reduces(op, trace):
            real.update(memory)
        in_registers = real.isdisjoint(memory)
        until = max((ends.get(name, position) for name in memory), default=position) if in_registers else position
        for name in op.ins:
            read = owner[name]
            ends[read] = max(ends.get(read, -1), until)
            if not loop or phase.get(read) is not op.phase:
                real.add(read)
        for name in memory:
            ends.setdefault(name, position)
    return {name: end for name, end in ends.items() if name in real}


def _reduces(op: Op, trace: Trace) -> bool:
    read = max((numel(trace.types[name]) for name in op.ins), default=0)
    return all(numel(trace.types[name]) < read for name in op.outs)
