"""dce: drop ops whose results nothing needs.

Requires  SSA; dependency order. A joint trace, or one half.
Ensures   same inputs, outputs and gradients. Kept even where nothing reads their results: OPAQUE ops, COLLECTIVE and
          WAIT ops (the other ranks take part), and writes to memory of an input, a result or a value that a kept op
          reads. A RANDOM op that nothing reads is dropped, as torch.compile drops it: what is drawn from the global
          generator after the step then differs from eager, which draws it.
Cost      one walk from the end, O(ops + operands).
"""
from __future__ import annotations

from jointtrace.ir.op import Op, Tag
from jointtrace.ir.trace import Trace
from jointtrace.passes._storage import storages

EFFECTS = frozenset({Tag.OPAQUE, Tag.COLLECTIVE, Tag.WAIT})


def dce(trace: Trace) -> Trace:
    """Return `trace` without the ops that its results and effects do not need."""
    storage = storages(trace)
    needed = {*trace.output_names, *trace.grad_names}
    # the caller still holds the inputs' memory when the trace has run
    used = {storage[name] for name in (*trace.inputs, *needed)}
    kept: list[Op] = []
    for op in reversed(trace.ops):
        writes_used = any(storage[name] in used for name in op.writes)
        if op.tags & EFFECTS or writes_used or not needed.isdisjoint(op.outs):
            kept.append(op)
            needed.update(op.ins)
            used.update(storage[name] for name in op.ins)
    kept.reverse()
    return trace.rebuild(kept, by="dce")
