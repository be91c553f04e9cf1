"""split: one joint trace becomes its forward and its backward half.

Requires  a joint trace: forward ops before backward ops, one `get_grad` per position of the outputs at most.
Ensures   forward: the joint inputs; the joint outputs, then the saved values. backward: the saved values, then the
          cotangents that exist; the gradients, one entry per joint input. The `get_grad` ops are gone: what they made
          are inputs of the backward. Running one half after the other computes what the joint trace computes.
Cost      one walk, O(ops + operands).
"""
from __future__ import annotations

from dataclasses import dataclass

from jointtrace.errors import VerifyError
from jointtrace.ir.op import Tag, Var
from jointtrace.ir.trace import Trace
from jointtrace.passes._storage import storages
from jointtrace.passes.recompute import saved


@dataclass(frozen=True)
class Halves:
    """The two programs of one training step.

    Attributes:
        forward: outputs are those of the joint trace, then one `Var` per saved value.
        backward: inputs are the saved values, then the cotangents that exist; None where nothing has a gradient.
        saved: names of what the forward hands to the backward, in trace order, each once.
        cotangents: for each joint output the name of its cotangent, None where the backward does not read it.
    """

    forward: Trace
    backward: Trace | None
    saved: tuple[str, ...]
    cotangents: tuple[str | None, ...]


def split(trace: Trace) -> Halves:
    """Split a joint trace; the backward is None where no input has a gradient."""
    forward_ops = trace.ops[: trace.boundary]
    if not trace.grad_names:
        forward = trace.rebuild(forward_ops, by="split", grads=())
        return Halves(forward, None, (), (None,) * len(trace.outputs))
    keep = saved(trace)
    cotangents = _cotangents(trace)
    forward = trace.rebuild(forward_ops, by="split", outputs=(*trace.outputs, *map(Var, keep)), grads=())
    backward = trace.rebuild(
        (op for op in trace.ops[trace.boundary :] if Tag.GET_GRAD not in op.tags),
        by="split",
        inputs=(*keep, *(name for name in cotangents if name is not None)),
        outputs=trace.grads,
        grads=(),
    )
    return Halves(forward, backward, keep, cotangents)


def depends(trace: Trace) -> tuple[frozenset[int], ...]:
    """Return for each gradient of a joint trace the positions of the outputs whose cotangents it is computed from.

    Where all of them are None when the backward runs, eager gives no gradient: neither may we. Exact before regions are
    formed; every result of a region depends on all that the region reads.
    """
    storage = storages(trace)
    # sets of positions as the bits of a number: unions stay cheap on long traces
    values: dict[str, int] = {}
    memory: dict[str, int] = {}
    for op in trace.ops[trace.boundary :]:
        if Tag.GET_GRAD in op.tags:
            mask = 1 << op.args[1]
        else:
            mask = 0
            for name in op.ins:
                mask |= values.get(name, 0) | memory.get(storage[name], 0)
        values.update((name, mask) for name in op.outs)
        memory.update((storage[name], mask) for name in op.writes)  # also holds earlier writes: it read that memory
    return tuple(
        _positions(values.get(grad.name, 0) | memory.get(storage[grad.name], 0)) if grad else frozenset()
        for grad in trace.grads
    )


def _cotangents(trace: Trace) -> tuple[str | None, ...]:
    found: list[str | None] = [None] * len(trace.outputs)
    for op in trace.ops[trace.boundary :]:
        if Tag.GET_GRAD in op.tags:
            position = op.args[1]
            if found[position] is not None:
                raise VerifyError(f"output {position} has two get_grad ops: %{found[position]} and %{op.outs[0]}")
            found[position] = op.outs[0]
    return tuple(found)


def _positions(mask: int) -> frozenset[int]:
    return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)
