"""Facts derived from a trace: who makes and reads each value, what shares memory, how many bytes are alive when.

Pure functions, each one walk over the trace; a pass asks once and keeps the answer. The position of an op is its
index in `trace.ops`; what the caller gets (outputs and grads) is read at position `len(trace.ops)`.
"""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain

import torch

from jointtrace.ir.op import Op, Size, Tag, TensorType, Type
from jointtrace.ir.trace import Trace

PACKED_ITEMS = {torch.quint4x2: 2, torch.quint2x4: 4}  # torch keeps so many items in a byte; all else has whole bytes
SHARING = frozenset({Tag.VIEW, Tag.WAIT})  # a wait returns the memory it waited for


def uses(trace: Trace) -> dict[str, list[int]]:
    """Return for every value the positions that read it, rising, each once."""
    found: dict[str, list[int]] = {name: [] for name in trace.inputs}
    for position, op in enumerate(trace.ops):
        for name in dict.fromkeys(op.ins):
            found.setdefault(name, []).append(position)
        for name in op.outs:
            found.setdefault(name, [])
    for name in dict.fromkeys((*trace.output_names, *trace.grad_names)):
        found.setdefault(name, []).append(len(trace.ops))
    return found


def last_use(trace: Trace) -> dict[str, int]:
    """Return for every value the last position that reads it, or else the one that makes it (-1: an input)."""
    found = dict.fromkeys(trace.inputs, -1)
    for position, op in enumerate(trace.ops):
        found.update(dict.fromkeys((*op.ins, *op.outs), position))
    found.update(dict.fromkeys((*trace.output_names, *trace.grad_names), len(trace.ops)))
    return found


def producers(trace: Trace) -> dict[str, Op]:
    """Return for every value but the inputs the op that makes it."""
    return {name: op for op in trace.ops for name in op.outs}


def needed(trace: Trace, roots: Iterable[str]) -> frozenset[str]:
    """Return `roots` and all values that computing them reads, directly or through other values."""
    found = set(roots)
    for op in reversed(trace.ops):
        if not found.isdisjoint(op.outs):
            found.update(op.ins)
    return frozenset(found)


def hint(size: Size) -> int:
    """Return a size as a number: the one that was seen where it is unknown."""
    return size if isinstance(size, int) else size.hint


def numel(type_: Type | None) -> int:
    """Return the elements of a tensor; 0 for what is no tensor."""
    return math.prod(map(hint, type_.shape)) if isinstance(type_, TensorType) else 0


def nbytes(type_: Type) -> int:
    """Return the bytes of memory that a value of this type spans; 0 for what is no tensor, symbols count by their hint.

    With known strides that is what lies between the first and the last element: an expanded scalar spans one element.
    """
    if not isinstance(type_, TensorType):
        return 0
    shape = [hint(size) for size in type_.shape]
    items = 1
    if 0 in shape:
        items = 0
    elif type_.strides is not None:
        items += sum((size - 1) * hint(stride) for size, stride in zip(shape, type_.strides, strict=True))
    else:
        for size in shape:
            items *= size
    return -(-items * type_.dtype.itemsize // PACKED_ITEMS.get(type_.dtype, 1))


def storage(trace: Trace) -> dict[str, str]:
    """Return for every value the name of the first value that shares its memory.

    A view shares with the first tensor it is given, a result of a wait with what was waited for, the results of an
    op that writes with what it writes to: in order, or all with the first where their numbers differ. What a region or
    an opaque op returns counts as new.
    """
    owner = {name: name for name in trace.inputs}
    for op in trace.ops:
        owner.update((out, owner.get(base, base)) for out, base in zip(op.outs, _bases(op, trace), strict=True))
    return owner


def mutated(trace: Trace) -> frozenset[str]:
    """Return the values whose memory some op writes to, before or after they are made."""
    owner = storage(trace)
    written = {owner[name] for op in trace.ops for name in op.writes}
    return frozenset(name for name in owner if owner[name] in written)


def live_bytes(trace: Trace) -> list[int]:
    """Return for every position the bytes alive after that op has run and what nothing reads any more is freed.

    Counts memory, not values: views are free, and keep what they view alive. Inputs belong to the caller and do not
    count; outputs and grads stay alive to the end. What a region needs inside itself does not count.
    """
    change, _ = _allocations(trace)
    return list(accumulate(change))


def peak_bytes(trace: Trace) -> int:
    """Return the most bytes alive at once: while an op runs, what it reads and what it makes both are."""
    change, made = _allocations(trace)
    return max((before + new for before, new in zip(accumulate(change, initial=0), made, strict=False)), default=0)


def _allocations(trace: Trace) -> tuple[list[int], list[int]]:
    """Return for every position the change in bytes alive, and the bytes that the op makes."""
    owner = storage(trace)
    last = last_use(trace)
    end: defaultdict[str, int] = defaultdict(lambda: -1)
    for name, position in last.items():
        end[owner.get(name, name)] = max(end[owner.get(name, name)], position)
    made = [sum(nbytes(trace.types[name]) for name in op.outs if owner[name] == name) for op in trace.ops]
    change = made.copy()
    for name in chain.from_iterable(op.outs for op in trace.ops):
        if owner[name] == name and end[name] < len(trace.ops):
            change[end[name]] -= nbytes(trace.types[name])
    return change, made


def _bases(op: Op, trace: Trace) -> Iterator[str]:
    """Yield for each result of `op` the value whose memory it shares: itself where it is new."""
    bases = op.writes
    if not bases and op.tags & SHARING:
        bases = tuple(name for name in op.ins if isinstance(trace.types.get(name), TensorType))[:1]
    if not bases:
        yield from op.outs
    elif len(bases) == len(op.outs):
        yield from bases
    else:
        yield from (bases[0] for _ in op.outs)
