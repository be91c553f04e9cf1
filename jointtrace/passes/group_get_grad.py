"""group_get_grad: all `get_grad` in one block, right before the first other backward op.

Requires  a joint trace: forward ops before backward ops. A `get_grad` reads only an output of the forward.
Ensures   same ops, in the same order within the block and after it; no `get_grad` stands between two ops that an
          executor could fuse.
Cost      one walk, O(ops).
"""
from __future__ import annotations

from jointtrace.ir.op import Op, Phase, Tag
from jointtrace.ir.trace import Trace


def group_get_grad(trace: Trace) -> Trace:
    """Return `trace` with its backward starting with all its `get_grad` ops."""
    forward: list[Op] = []
    cotangents: list[Op] = []
    backward: list[Op] = []
    for op in trace.ops:
        if Tag.GET_GRAD in op.tags:
            cotangents.append(op)
        else:
            (backward if op.phase is Phase.BW else forward).append(op)
    return trace.rebuild([*forward, *cotangents, *backward], by="group_get_grad")
