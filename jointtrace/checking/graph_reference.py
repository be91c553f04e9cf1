"""graph_reference: a joint graph as AOTAutograd made it, run node by node; the first stage must agree with it."""
from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from jointtrace.checking.compare import SAME_OPS, difference
from jointtrace.checking.interpret import copies, flat_ops
from jointtrace.checking.program import Outcome, Program
from jointtrace.ir.op import Op, Tag
from jointtrace.ir.trace import Trace


class GraphReference:
    """Runs `module` on the inputs and cotangents of `trace`, which was made of it.

    Args:
        module: the joint graph: placeholders are inputs, then cotangents.
        trace: the joint trace made of it.
    """

    name = "the joint graph"
    tolerance = SAME_OPS
    differentiable: tuple[bool, ...] | None = None

    def __init__(self, module: GraphModule, trace: Trace) -> None:
        self.module = module
        self.trace = trace
        self.values: dict[str, Any] = {}
        self.positions = {op.outs[0]: op.args[1] for op in trace.ops if Tag.GET_GRAD in op.tags}

    def run(self, inputs: Sequence[Any], cotangents: Mapping[int, Any] | None, drawn: Mapping[str, Any]) -> Outcome:
        """Run the graph; without cotangents, as far as the outputs need."""
        inputs = copies(inputs)
        given = dict(zip(self.trace.inputs, inputs, strict=True))
        if cotangents is not None:
            given.update((name, cotangents[position]) for name, position in self.positions.items())
        interpreter = _ByName(self.module, drawn)
        self.values = interpreter.values
        results = interpreter.results(given, len(self.trace.outputs) if cotangents is None else None)
        count = len(self.trace.outputs)
        grads = None if cotangents is None else [g if isinstance(g, torch.Tensor) else None for g in results[count:]]
        if grads is not None:  # inputs that only order effects come first, and have none
            grads = [None] * (len(inputs) - len(grads)) + grads
        return Outcome(list(results[:count]), grads, inputs)

    def locate(self, outcome: Outcome, program: Program) -> tuple[Op | None, str]:
        """Return the first op whose value is not that of its node."""
        for op in flat_ops(program.forward):
            for name in op.outs:
                if name in self.values and name in outcome.values:
                    how = difference(outcome.values[name], self.values[name], SAME_OPS)
                    if how is not None:
                        return op, f"%{name}: {how}"
        return None, "no op differs"


class _ByName(Interpreter):
    """Runs a graph on placeholders by name, and keeps every value; a random node makes what was `drawn` for it."""

    def __init__(self, module: GraphModule, drawn: Mapping[str, Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.drawn = drawn
        self.values: dict[str, Any] = {}

    def results(self, given: Mapping[str, Any], count: int | None) -> Sequence[Any]:
        """Return the first `count` results (all of them), running only what they need."""
        graph: Any = self.module.graph
        nodes: list[Node] = list(graph.nodes)
        output: Any = nodes.pop()
        wanted = output.args[0] if count is None else output.args[0][:count]
        needed = {n for n in wanted if isinstance(n, Node)}
        for node in reversed(nodes):
            if node in needed or (_writes(node) and (count is None or not _is_backward(node))):
                needed.update((node, *node.all_input_nodes))
        for node in nodes:
            if node.op == "placeholder":
                if node.name in given:
                    self.env[node] = given[node.name]
            elif node in needed:
                self.env[node] = self.drawn_for(node) if _is_random(node) else self.run_node(node)
                value = self.env[node]
                self.values[node.name] = value.clone() if isinstance(value, torch.Tensor) else value
        return [self.env[n] if isinstance(n, Node) else n for n in wanted]

    def drawn_for(self, node: Node) -> Any:
        """Return what the trace drew for a random node."""
        if node.name in self.drawn:
            return self.drawn[node.name]
        parts = {user.args[1]: user.name for user in node.users if user.target is operator.getitem}
        return {index: self.drawn.get(name) for index, name in parts.items()}


def _is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_backward(node: Node) -> bool:
    return str(node.meta.get("partitioner_tag", "")) in ("is_backward", "must_be_in_backward")
