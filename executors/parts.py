"""parts: graphs for Inductor in which no operator is left that torch defines by other operators.

AOTAutograd leaves none; our passes add some (`jointtrace.counter_draw`). Private parts of torch (2.10 to 2.14):
`OpOverload._can_decompose`, `make_fx`, Inductor's decomposition table.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg


def with_parts(module: GraphModule, fake_mode: Any) -> GraphModule:
    """Return a graph with each operator that torch defines by others written as those; itself where there is none."""
    if not any(map(_has_parts, module.graph.nodes)):
        return module
    graph = Graph()
    copies: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if _has_parts(node):
            parts = _parts(node, fake_mode)
            operands = [copies[operand] for operand in node.all_input_nodes]
            known = dict(zip(parts.find_nodes(op="placeholder"), operands, strict=True))
            copies[node] = graph.graph_copy(parts, known)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return GraphModule(module, graph)


def _has_parts(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._can_decompose()


def _parts(node: Node, fake_mode: Any) -> Graph:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    values = [operand.meta["val"] for operand in node.all_input_nodes]
    with fake_mode:  # also for the tensors that the operator makes from nothing
        return make_fx(_call_of(node), decomposition_table=select_decomp_table())(*values).graph


def _call_of(node: Node) -> Callable[..., Any]:
    """Return what `node` computes as a function of its operands."""

    def call(*values: Any) -> Any:
        given = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = map_arg((node.args, dict(node.kwargs)), given.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    return call
