"""fx: AOTAutograd's graphs as traces, and back.

An op carries its graph node as payload, so that what goes back keeps the node's metadata (values, stack traces, module
paths). `getitem` nodes are no ops here: an op with several results makes several values. Holds for torch 2.10 to 2.14:
the metadata keys `val`, `desc`, `partitioner_tag`, `recompute`, `stack_trace`, `nn_module_stack`.
"""
from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from jointtrace.ir.aten import tags_of, writes_of
from jointtrace.ir.op import ObjectType, Op, Phase, ScalarType, Source, Symbol, Tag, Target, TensorType, Type, Var, map_leaves
from jointtrace.ir.trace import Trace

RECOMPUTE = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})
FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class Converted:
    """A graph as a trace; `tangents` names the placeholders that are cotangents, in order."""

    trace: Trace
    tangents: tuple[str, ...]


def to_trace(module: GraphModule, num_outputs: int | None = None) -> Converted:
    """Return a graph as a trace: a joint one with `num_outputs` forward outputs, or (None) one half as it is."""
    return _Reader(module, num_outputs).read()


class _Reader:
    def __init__(self, module: GraphModule, num_outputs: int | None) -> None:
        self.module = module
        self.num_outputs = num_outputs
        self.nodes = list(module.graph.nodes)
        self.output = self.nodes[-1]
        self.leaf: dict[Node, Any] = {}  # what stands for a node in arguments
        self.types: dict[str, Type] = {}
        self.parts = _parts(self.nodes)

    def read(self) -> Converted:
        inputs, tangents, forward, backward = [], [], [], []
        for node in self.nodes[:-1]:
            if node.op == "placeholder":
                self.name(node)
                (tangents if self.num_outputs is not None and _is_tangent(node) else inputs).append(node)
            elif node.op == "get_attr":
                self.leaf[node] = _attribute(self.module, str(node.target))
            elif node not in self.leaf:
                op = self.op(node)
                (backward if op.phase is Phase.BW else forward).append(op)
        results = self.tree(self.output.args[0])
        if self.num_outputs is None:
            return Converted(self.trace(inputs, forward, tuple(results), ()), ())
        outputs, grads = tuple(results[: self.num_outputs]), tuple(results[self.num_outputs :])
        gets = self.get_grads(tangents, outputs)
        grads = tuple(g if isinstance(g, Var) else None for g in grads)
        return Converted(self.trace(inputs, [*forward, *gets, *backward], outputs, grads), tuple(t.name for t in tangents))

    def trace(self, inputs: Sequence[Node], ops: Sequence[Op], outputs: tuple[Any, ...], grads: tuple[Any, ...]) -> Trace:
        empty = Trace(tuple(n.name for n in inputs), (), outputs, grads, self.types)
        return empty.rebuild(ops, by="aot")

    def op(self, node: Node) -> Op:
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            parts = self.parts.get(node, {})
            for index, users in parts.items():
                for user in users:
                    self.leaf[user] = Var(users[0].name)
                self.types[users[0].name] = type_of(value[index])
            out: Any = type(value)(Var(parts[i][0].name) if i in parts else None for i in range(len(value)))
        else:
            out = self.name(node)
        args, kwargs = self.tree(node.args), self.tree(node.kwargs)
        tags = tags_of(node.target) | _user_tags(node)
        backward = self.num_outputs is not None and node.meta.get("partitioner_tag") in (
            "is_backward", "must_be_in_backward")
        return Op(Target(_target_name(node.target), node.target), args, kwargs, out, tags,
                  Phase.BW if backward else Phase.FW, writes_of(node.target, args, kwargs), _source(node), payload=node)

    def name(self, node: Node) -> Var:
        self.types[node.name] = type_of(node.meta.get("val"))
        self.leaf[node] = Var(node.name)
        return self.leaf[node]

    def tree(self, tree: Any) -> Any:
        return torch.fx.node.map_aggregate(tree, lambda leaf: self.leaf[leaf] if isinstance(leaf, Node) else leaf)

    def get_grads(self, tangents: Sequence[Node], outputs: tuple[Any, ...]) -> list[Op]:
        """Return one GET_GRAD for each tangent, at the position of the output whose cotangent it is."""
        described = self.output.meta.get("desc") or []
        free = [i for i, out in enumerate(outputs) if isinstance(out, Var)]
        ops = []
        for tangent in tangents:
            wanted = getattr(tangent.meta.get("desc"), "output", None)
            position = next((i for i in free if i < len(described) and described[i] == wanted), free[0])
            free.remove(position)
            ops.append(Op(Target("get_grad"), (outputs[position], position), out=Var(tangent.name),
                          tags=frozenset({Tag.GET_GRAD}), phase=Phase.BW, payload=tangent))
        return ops


def to_joint_graph(trace: Trace, like: GraphModule) -> tuple[GraphModule, dict[str, Node]]:
    """Return a joint trace as a graph module with the placeholders of `like`, and its nodes by value name."""
    graph = Graph()
    nodes: dict[str, Node] = {}
    for node in like.graph.find_nodes(op="placeholder"):
        nodes[node.name] = graph.node_copy(node)
        nodes[node.name].name = node.name
    writer = _Writer(graph, nodes, like)
    for op in trace.ops:
        if Tag.GET_GRAD not in op.tags:
            writer.add(op)
    results = graph.output(writer.tree((*trace.outputs, *trace.grads)))
    results.meta = dict(like.graph.output_node().meta)
    return GraphModule(like, graph), nodes


def to_region_graph(body: Trace) -> tuple[GraphModule, list[Any]]:
    """Return the body of a region, whose ops are nodes of one graph, as a graph module with its example inputs."""
    whole = body.ops[0].payload.graph
    known = {node.name: node for node in whole.nodes}
    graph = Graph()
    nodes = {name: graph.node_copy(known[name], lambda _: None) if known[name].op == "placeholder"
             else _placeholder(graph, known[name]) for name in body.inputs}
    writer = _Writer(graph, nodes, body.ops[0].payload.graph.owning_module)
    for op in body.ops:
        writer.add(op)
    graph.output(writer.tree(tuple(body.outputs)))
    return GraphModule(whole.owning_module, graph), [known[name].meta["val"] for name in body.inputs]


def _placeholder(graph: Graph, node: Node) -> Node:
    made = graph.placeholder(node.name)
    made.meta = dict(node.meta)
    return made


class _Writer:
    def __init__(self, graph: Graph, nodes: dict[str, Node], owner: Any) -> None:
        self.graph = graph
        self.nodes = nodes
        self.attributes = {id(_attribute(owner, str(n.target))): n for n in getattr(owner, "graph", Graph()).nodes
                           if n.op == "get_attr"}
        self.copied: dict[Node, Node] = {}

    def add(self, op: Op) -> None:
        node: Node = op.payload
        made = self.graph.call_function(node.target, self.tree(op.args), self.tree(dict(op.kwargs)))
        made.meta = dict(node.meta)
        if op.phase is Phase.BW:
            made.meta["partitioner_tag"] = "is_backward"
        if isinstance(op.out, Var):
            self.bind(op.out.name, made)
            return
        for index, var in enumerate(op.out):
            if isinstance(var, Var):
                part = self.graph.call_function(operator.getitem, (made, index))
                part.meta = {**made.meta, "val": node.meta["val"][index]}
                self.bind(var.name, part)

    def bind(self, name: str, node: Node) -> None:
        self.nodes[name] = node
        node.name = name

    def tree(self, tree: Any) -> Any:
        return map_leaves(self.leaf, tree)

    def leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Var):
            return self.nodes[leaf.name]
        attribute = self.attributes.get(id(leaf))
        if attribute is None:
            return leaf
        if attribute not in self.copied:
            self.copied[attribute] = self.graph.node_copy(attribute)
        return self.copied[attribute]


def type_of(value: Any) -> Type:
    """Return the type of a node's example value."""
    if isinstance(value, torch.Tensor):
        strides = tuple(map(_size, value.stride())) if value.layout is torch.strided else None
        return TensorType(tuple(map(_size, value.shape)), value.dtype, str(value.device), strides)
    for kind, symbolic in ((bool, torch.SymBool), (int, torch.SymInt), (float, torch.SymFloat)):
        if isinstance(value, (kind, symbolic)):
            return ScalarType(kind.__name__)
    return ObjectType(type(value).__name__)


def _size(size: Any) -> int | Symbol:
    if isinstance(size, int):
        return size
    return Symbol(str(size), size.node.hint if size.node.hint is not None else 1)


def _parts(nodes: Sequence[Node]) -> Mapping[Node, dict[int, list[Node]]]:
    parts: dict[Node, dict[int, list[Node]]] = {}
    for node in nodes:
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            source = node.args[0]
            if source.op == "call_function" and isinstance(source.meta.get("val"), (tuple, list)):
                parts.setdefault(source, {}).setdefault(node.args[1], []).append(node)
    return parts


def _user_tags(node: Node) -> frozenset[Tag]:
    return frozenset({Tag.RECOMPUTE}) if node.meta.get("recompute") in RECOMPUTE else frozenset()


def _is_tangent(node: Node) -> bool:
    return "tangents" in str(node.target)


def _target_name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def _attribute(owner: Any, path: str) -> Any:
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


def _source(node: Node) -> Source | None:
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return None
    path, line = frames[-1]
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    module = modules[-1][0] if modules else ""
    return Source(os.path.basename(path), int(line), _short(module), path=path)


def _short(module: str) -> str:
    return re.sub(r"^L\['self'\]\.?", "", module)

