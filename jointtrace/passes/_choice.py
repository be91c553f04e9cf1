"""The choice that `recompute` makes: what may be kept for the backward, what may be computed again, at what cost.

Costs are bytes of memory traffic (see `_cost`). A plan is a set of forward values that the backward computes again;
what it reads beyond them is kept.
"""
from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from jointtrace.ir.facts import nbytes
from jointtrace.ir.op import Op, Tag
from jointtrace.ir.trace import Trace
from jointtrace.passes._again import Fused, TooDear, in_several_loops, why_not
from jointtrace.passes._cost import KEPT_BYTE, recompute_cost
from jointtrace.passes._cut import SINK, SOURCE, FlowGraph
from jointtrace.passes._save import HELD, save_costs, saved
from jointtrace.passes._storage import storages, written


@dataclass(frozen=True)
class Choice:
    """What can be chosen for a joint trace.

    Attributes:
        trace: the joint trace.
        fused: says of an op whether it runs inside a compiled loop.
        reads: the inputs and forward values that the backward reads, in trace order.
        values: `reads` and all that computing them again may read, in trace order.
        maker: the op behind each value that is no input.
        why_kept: for each value whose op must not run again in the backward, why.
        why_again: for each value that must not be kept, why.
        nbytes: what keeping a value keeps alive, `HELD` where the caller does anyway.
        again: for each value the cost of running its op again.
        price: the cost of a kept byte.
    """

    trace: Trace
    fused: Fused
    reads: tuple[str, ...]
    values: tuple[str, ...]
    maker: Mapping[str, Op]
    why_kept: Mapping[str, str]
    why_again: Mapping[str, str]
    nbytes: Mapping[str, int]
    again: Mapping[str, int]
    price: int = KEPT_BYTE

    def keep(self, name: str) -> int:
        """Return the cost of keeping a value."""
        return self.nbytes[name] if self.nbytes[name] <= HELD else self.price * self.nbytes[name]

    def cost(self, again: Set[str]) -> int:
        """Return the cost of a plan: its kept bytes and the ops that run again, each once."""
        kept, ops = plan_of(self, again)
        return sum(self.keep(name) for name in kept) + sum(self.again[name] for name in ops)


def choice_of(trace: Trace, fused: Fused, too_dear: TooDear) -> Choice:
    """Return the choice for `trace`; what `too_dear` gives a reason for runs again in the user's checkpoints only."""
    sizes, storage = save_costs(trace), storages(trace)
    unstable = set(written(trace.ops, storage))
    maker = {name: op for op in trace.ops[: trace.boundary] for name in op.outs}
    reads = saved(trace)
    why_kept: dict[str, str] = {}
    why_again: dict[str, str] = {}
    again: dict[str, int] = {}
    todo = list(reads)
    while todo:
        name = todo.pop()
        if name in again:
            continue
        op = maker.get(name)
        again[name] = recompute_cost(op, trace.types, fused) if op else 0
        reason = why_not(op, too_dear, unstable, storage) if op else "it is an input"
        if op is None or reason is not None:
            why_kept[name] = str(reason)
            continue
        if Tag.RECOMPUTE in op.tags and sizes[name] != HELD:
            why_again[name] = f"%{name} is made in a checkpoint, so it is not kept"
        todo.extend(op.ins)
    values = tuple(name for name in (*trace.inputs, *maker) if name in again)
    for name in in_several_loops(trace, fused, values, why_kept):
        again[name] += KEPT_BYTE * nbytes(trace.types[name])
    return Choice(trace, fused, reads, values, maker, why_kept, why_again, sizes, again)


def cheapest(choice: Choice) -> set[str]:
    """Return the values to compute again in the cheapest plan, of several the one with the least to compute.

    A value is an edge from its `made` to its `kept` node; cutting it is keeping the value. What is on the sink's side
    exists in the backward: a value `made` there is computed again, so the operands of its op must be `kept` there.

    Raises:
        UnsupportedError: a value must neither be kept nor computed again; the message gives the chain of reasons.
    """
    graph = FlowGraph()
    for name in choice.reads:
        graph.add(("kept", name), SINK, None, f"the backward reads %{name}")
    for name in choice.values:
        if name in choice.why_again:
            graph.add(("made", name), ("kept", name), None, choice.why_again[name])
        else:
            graph.add(("made", name), ("kept", name), choice.keep(name), f"%{name} is kept")
        if name in choice.why_kept:
            graph.add(SOURCE, ("made", name), None, f"%{name} is not computed again: {choice.why_kept[name]}")
        else:
            _add_op(graph, choice, name)
    near = graph.sink_side()
    return {name for name in choice.values if ("made", name) in near}


def _add_op(graph: FlowGraph, choice: Choice, name: str) -> None:
    op = choice.maker[name]
    node = ("op", op.outs[0])  # one node for all the values an op makes
    if node not in graph:
        graph.add(SOURCE, node, choice.again[name], f"{op.target.name} runs again")
        for operand in op.ins:
            graph.add(("kept", operand), node, None, f"{op.target.name}, computed again, reads %{operand}")
    graph.add(node, ("made", name), None, f"%{name} is made by {op.target.name}")


def plan_of(choice: Choice, again: Set[str]) -> tuple[list[str], list[str]]:
    """Return what a plan keeps, and one value of each op that it runs again because something needs it."""
    kept: dict[str, None] = {}
    ops: dict[str, str] = {}
    seen: set[str] = set()
    todo = list(choice.reads)
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        op = choice.maker.get(name)
        if op is None or name not in again:
            kept[name] = None
        else:
            ops[op.outs[0]] = name
            todo.extend(op.ins)
    return list(kept), list(ops.values())
