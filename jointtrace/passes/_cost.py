"""What it costs to compute an op again, and to keep a value, in one unit: bytes of memory traffic.

An analytic model after the roofline of Williams, Waterman and Patterson (2009): an op takes as long as the memory it
moves, or as its arithmetic, whose rates are stated as operations done in the time that one byte takes.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

from jointtrace.ir.draw import operations
from jointtrace.ir.facts import nbytes, numel
from jointtrace.ir.flops import flops
from jointtrace.ir.op import Op, Tag, TensorType, Type

KEPT_BYTE = 2
"""A kept byte is written in the forward and read in the backward."""
PREMIUM = 2
"""A kept byte counts for so many times its traffic where no budget says what memory is worth: a dropout mask, a byte
that costs three to draw again, is drawn again."""
FLOPS_PER_BYTE = 30
"""Of matrix products and attention: 300 GFLOP/s at 10 GB/s on the two cores where `benchmarks/floor.py` was measured;
accelerators do 100 and more, so that the model never makes a product look cheaper than it is there."""
ELEMENT = 0.5
"""Of one elementwise op inside a compiled loop: `exp` took 0.13 ns an element where a byte took 0.1 ns."""

Fused = Callable[[Op], bool]


def recompute_cost(op: Op, types: Mapping[str, Type], fused: Fused) -> int:
    """Return the traffic that computing `op` again costs; `fused` says whether it runs inside a compiled loop.

    Inside a loop operands come from registers, save those of a reduction, which has to read all of them again.
    """
    if Tag.VIEW in op.tags:
        return 0
    made = sum(nbytes(types[name]) for name in op.outs)
    read = sum(nbytes(types[name]) for name in dict.fromkeys(op.ins))
    if Tag.COMPUTE_BOUND in op.tags:
        return round(flops(op, types) / FLOPS_PER_BYTE) + read + made
    if _gathers(op, types):
        read = min(read, made)
    largest_made = max((numel(types[name]) for name in op.outs), default=0)
    largest_read = max((numel(types[name]) for name in op.ins), default=0)
    arithmetic = round(ELEMENT * operations(op.target.fn, op.args) * max(largest_made, largest_read))
    if not fused(op):
        return max(arithmetic, read + made)
    return arithmetic + (read if largest_read > largest_made and not _gathers(op, types) else 0)


def _gathers(op: Op, types: Mapping[str, Type]) -> bool:
    """Whether `op` picks elements by an index, so that it reads no more than it makes."""
    kinds = [kind for name in op.ins if isinstance(kind := types[name], TensorType)]
    floating = [kind.dtype.is_floating_point or kind.dtype.is_complex for kind in kinds]
    return any(floating) and any(not f and kind.dtype.itemsize > 1 for f, kind in zip(floating, kinds, strict=True))
