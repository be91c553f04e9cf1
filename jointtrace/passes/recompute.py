"""recompute: choose which forward values are saved for the backward, and which it computes again.

Requires  a joint trace in dependency order, without dead ops (what a dead op reads would be saved).
Ensures   same inputs, outputs, gradients and values. The choice is a minimum cut: a value costs its real bytes to
          save, next to nothing where the caller keeps its memory alive anyway. Of all minimum cuts it is the one with
          the least to compute again. Computed again are only ops that `cheap` allows and those of the user's
          checkpoints (RECOMPUTE), whose values are not saved; never ops that draw random numbers, communicate, write to
          memory, read memory that the trace writes to, of which nothing is known, or that are compute-bound outside a
          checkpoint. Each is computed again once, as `bw_<name>`, right before the first backward op that needs it.
Cost      one minimum cut over a graph of O(ops + operands).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

from jointtrace.ir.op import Op, Phase, Tag
from jointtrace.ir.trace import Trace
from jointtrace.passes._copy import compute_again
from jointtrace.passes._cut import SINK, SOURCE, FlowGraph
from jointtrace.passes._save import HELD, check_overwritten, save_costs
from jointtrace.passes._storage import storages, written

NEVER = frozenset({Tag.RANDOM, Tag.OPAQUE, Tag.COLLECTIVE, Tag.WAIT, Tag.SAVE})
DEAR = frozenset({Tag.COMPUTE_BOUND, Tag.CLAIMED})  # computed again in a checkpoint only


def recompute(trace: Trace, *, cheap: Callable[[Op], bool]) -> Trace:
    """Return `trace` with a backward that computes again what is not worth saving.

    `cheap` says of an op whether it may be computed again at all.

    Raises:
        UnsupportedError: the backward reads a value that the forward overwrites in place.
    """
    check_overwritten(trace)
    return compute_again(trace, _values_to_recompute(trace, cheap))


def saved(trace: Trace) -> tuple[str, ...]:
    """Return the names of the inputs and forward values that the backward or its results read, in trace order."""
    read = {n for op in trace.ops if op.phase is Phase.BW and Tag.GET_GRAD not in op.tags for n in op.ins}
    read.update(trace.grad_names)
    forward = dict.fromkeys(trace.inputs)
    for op in trace.ops[: trace.boundary]:
        forward.update(dict.fromkeys(op.outs))
    return tuple(name for name in forward if name in read)


def _values_to_recompute(trace: Trace, cheap: Callable[[Op], bool]) -> set[str]:
    """Return the forward values that the cheapest choice computes again.

    A value is an edge from its `made` to its `kept` node; cutting it is saving the value. What is on the sink's side
    exists in the backward: a value `made` there is computed again, so the operands of its op must be `kept` there.
    """
    graph = FlowGraph()
    costs, storage = save_costs(trace), storages(trace)
    unstable = set(written(trace.ops, storage))
    maker = {name: op for op in trace.ops[: trace.boundary] for name in op.outs}
    todo = list(saved(trace))
    for name in todo:
        graph.add(("kept", name), SINK, None, f"the backward reads %{name}")
    added: set[str] = set()
    while todo:
        name = todo.pop()
        if name in added:
            continue
        added.add(name)
        op = maker.get(name)
        why_not = "it is an input" if op is None else _why_not(op, cheap, unstable, storage)
        if op is None or why_not is not None:
            graph.add(SOURCE, ("made", name), None, f"%{name} is not computed again: {why_not}")
            graph.add(("made", name), ("kept", name), costs[name], f"%{name} is saved")
        else:
            _add_recomputable(graph, op, name, costs[name])
            todo.extend(op.ins)
    sink_side = graph.sink_side()
    return {name for name in added if ("made", name) in sink_side}


def _add_recomputable(graph: FlowGraph, op: Op, name: str, cost: int) -> None:
    if Tag.RECOMPUTE in op.tags and cost != HELD:
        graph.add(("made", name), ("kept", name), None, f"%{name} is made in a checkpoint, so it is not saved")
    else:
        graph.add(("made", name), ("kept", name), cost, f"%{name} is saved")
    node = ("op", op.outs[0])  # one node for all the values an op makes
    if node not in graph:
        for operand in op.ins:
            graph.add(("kept", operand), node, None, f"{op.target.name}, computed again, reads %{operand}")
    graph.add(node, ("made", name), None, f"%{name} is made by {op.target.name}")


def _why_not(op: Op, cheap: Callable[[Op], bool], unstable: set[str], storage: Mapping[str, str]) -> str | None:
    """Return why `op` must not run again in the backward, or None."""
    if never := op.tags & NEVER:
        return f"{op.target.name} is {min(tag.value for tag in never)}"
    if any(storage[name] in unstable for name in op.ins):
        return f"{op.target.name} reads or writes memory that is written to"
    if Tag.RECOMPUTE in op.tags:
        return None
    if dear := op.tags & DEAR:
        return f"{op.target.name} is {min(tag.value for tag in dear)}"
    return None if cheap(op) else f"{op.target.name} is not cheap"
