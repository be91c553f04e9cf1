"""cse: compute each repeated pure expression once.

Requires  SSA; dependency order.
Ensures   same inputs, outputs, gradients and values; never more ops; nothing merged across the forward/backward
          boundary (that would save a tensor `recompute` chose not to save); no two returned tensors share memory that
          did not share it before, because the caller may write to one of them; nothing merged that writes to memory,
          or reads, makes or aliases memory that some op of the trace writes to.
Cost      one walk, O(ops + operands).
"""
from __future__ import annotations

from typing import Any

from jointtrace.ir.op import Op, Tag, Var, hashable, map_leaves
from jointtrace.ir.trace import Trace
from jointtrace.passes._storage import storages, written

PINNED = frozenset({Tag.RANDOM, Tag.RECOMPUTE, Tag.SAVE, Tag.GET_GRAD, Tag.OPAQUE, Tag.COLLECTIVE, Tag.CLAIMED})


def cse(trace: Trace) -> Trace:
    """Return `trace` with later copies of a pure op replaced by the first one."""
    storage = storages(trace)
    fixed = {storage[name] for name in (*trace.output_names, *trace.grad_names)}
    unstable = set(written(trace.ops, storage))
    seen: dict[tuple[Any, ...], Op] = {}
    names: dict[str, str] = {}
    kept: list[Op] = []
    for op in trace.ops:
        stays = (
            op.tags & PINNED
            or any(storage[name] in fixed for name in op.outs)
            or any(storage[name] in unstable for name in (*op.ins, *op.outs))
        )
        op = op.rename_inputs(names)
        first = op if stays else seen.setdefault(_key(op), op)
        if first is op:
            kept.append(op)
        else:
            names.update(zip(op.outs, first.outs, strict=True))
    return trace.rebuild(kept, by="cse")


def _key(op: Op) -> tuple[Any, ...]:
    # two calls of one op may differ in which of their results became values
    return (op.key, hashable(map_leaves(lambda leaf: isinstance(leaf, Var), op.out)))
