"""Backward copies of forward ops, placed where the backward first needs them."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from jointtrace.ir.op import Op, Phase, Tag, Type, Var
from jointtrace.ir.trace import Trace


def compute_again(trace: Trace, values: Set[str]) -> Trace:
    """Return `trace` with a backward that computes the forward values in `values` again instead of reading them."""
    return with_copies(trace, values)[0]


def with_copies(trace: Trace, values: Set[str]) -> tuple[Trace, dict[str, str]]:
    """Return the trace of `compute_again`, and for each value that a copy makes the one that it is a copy of.

    Each op is copied at most once, with all its values, as `bw_<name>`; its copy stands right before the first
    backward op that needs it, after the copies it reads itself.
    """
    forward = trace.ops[: trace.boundary]
    maker = {name: position for position, op in enumerate(forward) for name in op.outs}
    left = {maker[name] for name in values}
    names: dict[str, str] = {}
    types: dict[str, Type] = {}
    taken = {*trace.inputs, *(name for op in trace.ops for name in op.outs)}
    ops = list(forward)

    def copy(wanted: Iterable[str]) -> None:
        for position in _missing(wanted, left, maker, forward):
            op = forward[position]
            fresh = {name: _fresh(name, taken) for name in op.outs}
            types.update((fresh[name], trace.types[name]) for name in op.outs)
            again = op.rename_inputs(names).rename_outputs(fresh)
            ops.append(again.replace(phase=Phase.BW, tags=op.tags - {Tag.RECOMPUTE}))
            names.update(fresh)

    for op in trace.ops[trace.boundary :]:
        if Tag.GET_GRAD in op.tags:  # names its output, reads nothing
            ops.append(op)
            continue
        copy(op.ins)
        ops.append(op.rename_inputs(names))
    copy(trace.grad_names)
    grads = tuple(grad and Var(names.get(grad.name, grad.name)) for grad in trace.grads)
    return trace.rebuild(ops, by="recompute", types=types, grads=grads), {copy: name for name, copy in names.items()}


def knowing_copies(fused: Callable[[Op], bool], copied: Mapping[str, str]) -> Callable[[Op], bool]:
    """Return `fused` for a trace with copies: what it says of an op rests on types, of which it knows none of copies.

    Args:
        fused: for the trace without them.
        copied: for each value that a copy makes the one that it is a copy of.
    """
    return lambda op: fused(op.rename_inputs(copied).rename_outputs(copied))


def _missing(wanted: Iterable[str], left: set[int], maker: Mapping[str, int], forward: Sequence[Op]) -> list[int]:
    """Take from `left` the positions of the ops that must run again for `wanted`; return them in dependency order."""
    taken: list[int] = []
    todo = list(wanted)
    while todo:
        position = maker.get(todo.pop())
        if position is not None and position in left:
            left.remove(position)
            taken.append(position)
            todo.extend(forward[position].ins)
    return sorted(taken)


def _fresh(name: str, taken: set[str]) -> str:
    fresh = f"bw_{name}"
    while fresh in taken:
        fresh += "_"
    taken.add(fresh)
    return fresh
