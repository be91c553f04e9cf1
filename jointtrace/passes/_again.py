"""What is known of running an op again in the backward: why not, and which results go through memory then."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from jointtrace.ir.memory import Fused, in_loop
from jointtrace.ir.op import Op, Tag, TensorType
from jointtrace.ir.trace import Trace

NEVER = frozenset({Tag.RANDOM, Tag.OPAQUE, Tag.COLLECTIVE, Tag.WAIT, Tag.SAVE})

TooDear = Callable[[Op], str | None]


def in_several_loops(trace: Trace, fused: Fused, values: Sequence[str], why_kept: Mapping[str, str]) -> Iterator[str]:
    """Yield the values that, computed again in one compiled loop, are needed in a later one too: through memory.

    A loop ends where an op runs outside of it. Views and conversions are made again wherever they are read.
    """
    first: dict[str, int] = {}  # loop of the backward, counted from its start
    last: dict[str, int] = {}
    loop = 0
    for op in trace.ops[trace.boundary:]:
        loop += Tag.VIEW not in op.tags and not in_loop(op, fused)
        for name in op.ins if Tag.GET_GRAD not in op.tags else ():
            first.setdefault(name, loop)
            last[name] = loop
    chosen = set(values) - why_kept.keys()
    for op in reversed(trace.ops[:trace.boundary]):
        needed = [name for name in op.outs if name in chosen and name in first]
        if not needed:
            continue
        begin = min(first[name] for name in needed)
        for name in op.ins:
            first[name] = min(first.get(name, begin), begin)
            last[name] = max(last.get(name, begin), begin)
        if Tag.VIEW not in op.tags and not _converts(op, trace):
            yield from (name for name in needed if last[name] > first[name])


def _converts(op: Op, trace: Trace) -> bool:
    """Whether `op` makes of one tensor one of another dtype, element by element."""
    kinds = [trace.types[name] for name in (*op.ins, *op.outs)]
    tensors = [kind for kind in kinds if isinstance(kind, TensorType)]
    return len(kinds) == len(tensors) == 2 and tensors[0].shape == tensors[1].shape and (
        tensors[0].dtype != tensors[1].dtype)


def why_not(op: Op, too_dear: TooDear, unstable: set[str], storage: Mapping[str, str]) -> str | None:
    """Return why `op` must not run again in the backward, or None."""
    if never := op.tags & NEVER:
        return f"{op.target.name} is {min(tag.value for tag in never)}"
    if any(storage[name] in unstable for name in op.ins):
        return f"{op.target.name} reads or writes memory that is written to"
    return None if op.tags & {Tag.RECOMPUTE, Tag.VIEW} else too_dear(op)
