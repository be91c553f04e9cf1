"""fx: AOTAutograd's graphs as traces, and back.

An op carries its graph node as payload, so that what goes back keeps the node's metadata (values, stack traces, module
paths). `getitem` nodes are no ops here: an op with several results makes several values. Holds for torch 2.10 to 2.14:
the metadata keys `val`, `desc`, `partitioner_tag`, `recompute`, `stack_trace`, `nn_module_stack`,
`fwd_nn_module_stack`, `fwd_source_fn_stack`, `seq_nr`, `original_aten`, `ac_graph_id`.
"""
from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils.checkpoint import CheckpointPolicy

from jointtrace.errors import UnsupportedError
from jointtrace.ir.aten import is_random, tags_of, writes_of
from jointtrace.ir.op import (
    ObjectType,
    Op,
    Phase,
    ScalarType,
    Source,
    Symbol,
    Tag,
    Target,
    TensorType,
    Type,
    Var,
    map_leaves,
    var_names,
)
from jointtrace.ir.trace import Trace

RECOMPUTE = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
CHECKPOINT = "ac_graph_id"  # metadata of a node: which call of a checkpoint it stands in
FORWARD_OP = "jointtrace_forward_op"  # metadata of a backward node, ours: it outlives the split from the forward nodes


@dataclass(frozen=True)
class Converted:
    """A graph as a trace.

    Attributes:
        trace: its gradients count also the tokens, which have none, among the inputs.
        tangents: the placeholders that are cotangents, in order.
        tokens: how many inputs, and outputs, come first that only order effects.
    """

    trace: Trace
    tangents: tuple[str, ...]
    tokens: int = 0


def to_trace(module: GraphModule, num_outputs: int | None = None, *, phase: Phase = Phase.FW) -> Converted:
    """Return a graph as a trace: a joint one with `num_outputs` forward outputs, or (None) one half, all of `phase`.

    Raises:
        UnsupportedError: the backward has effects that must keep an order, or draws by seeds handed to it.
    """
    return _Reader(module, num_outputs, phase).read()


class _Reader:
    def __init__(self, module: GraphModule, num_outputs: int | None, phase: Phase) -> None:
        self.module = module
        self.num_outputs = num_outputs
        self.phase = phase
        self.nodes = list(module.graph.nodes)
        self.output = self.nodes[-1]
        self.leaf: dict[Node, Any] = {}  # what stands for a node in arguments
        self.types: dict[str, Type] = {}
        self.parts = _parts(self.nodes)
        self.of_backward: set[str] = set()  # values that exist in the backward only
        self.changing = set() if num_outputs is None else _overwritten(self.nodes)
        if num_outputs is not None:
            _name_forward_ops(self.nodes)

    def read(self) -> Converted:
        inputs, tangents, forward, backward = [], [], [], []
        for node in self.nodes[:-1]:
            if node.op == "placeholder":
                self.name(node)
                (tangents if self.num_outputs is not None and _is_tangent(node) else inputs).append(node)
                self.of_backward.update([node.name] if node in tangents[-1:] else ())
            elif node.op == "get_attr":
                self.leaf[node] = _attribute(self.module, str(node.target))
            elif node not in self.leaf:
                op = self.op(node)
                (backward if op.phase is Phase.BW else forward).append(op)
        results = self.tree(self.output.args[0])
        if self.num_outputs is None:
            return Converted(self.trace(inputs, [*forward, *backward], tuple(results), ()), ())
        outputs, grads = tuple(results[: self.num_outputs]), tuple(results[self.num_outputs :])
        tokens = _count_tokens(inputs)
        if len(grads) + tokens != len(inputs):
            raise UnsupportedError(
                f"a backward of {len(grads)} results for {len(inputs) - tokens} inputs: effects in the backward, or "
                "functionalized random state; leave such operations out of the compiled function")
        gets = self.get_grads(tangents, outputs)
        grads = (*(None for _ in range(tokens)), *(g if isinstance(g, Var) else None for g in grads))
        trace = self.trace(inputs, [*forward, *gets, *backward], outputs, grads)
        return Converted(trace, tuple(t.name for t in tangents), tokens)

    def trace(
        self, inputs: Sequence[Node], ops: Sequence[Op], outputs: tuple[Any, ...], grads: tuple[Any, ...]
    ) -> Trace:
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
        phase = self.phase_of(node, (args, kwargs), out)
        tags = tags_of(node.target)
        if Tag.RANDOM in tags and not is_random(node.target, args, kwargs):
            tags -= {Tag.RANDOM}
        if phase is Phase.FW:
            tags |= self.user_tags(node, (args, kwargs), out)
        target: Any = node.target
        return Op(Target(_target_name(target), target), args, kwargs, out, tags, phase,
                  writes_of(target, args, kwargs), _source(node), payload=node)

    def user_tags(self, node: Node, read: Any, made: Any) -> frozenset[Tag]:
        """Return whether a forward op is to be computed again; not what reads memory that has changed by then."""
        if self.changing.isdisjoint(var_names(read)):
            return _user_tags(node)
        if Tag.VIEW not in tags_of(node.target):
            return frozenset({Tag.SAVE})
        self.changing.update(var_names(made))
        return frozenset()

    def phase_of(self, node: Node, read: Any, made: Any) -> Phase:
        """Return the phase AOTAutograd gave a node; what a later pass of its made without one goes by what it reads."""
        if self.num_outputs is None:
            return self.phase
        if not _is_backward(node) and self.of_backward.isdisjoint(var_names(read)):
            return Phase.FW
        self.of_backward.update(var_names(made))
        return Phase.BW

    def name(self, node: Node) -> Var:
        self.types[node.name] = type_of(node.meta.get("val"))
        self.leaf[node] = Var(node.name)
        return self.leaf[node]

    def tree(self, tree: Any) -> Any:
        return map_aggregate(tree, lambda leaf: self.leaf[leaf] if isinstance(leaf, Node) else leaf)

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
    writer = _Writer(graph, nodes, like)
    for op in trace.ops:
        if Tag.GET_GRAD not in op.tags:
            writer.add(op)
    tokens = _count_tokens([nodes[name] for name in trace.inputs])
    results = graph.output(writer.tree((*trace.outputs, *trace.grads[tokens:])))
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
    made.meta = {key: value for key, value in node.meta.items() if key != "unbacked_bindings"}  # it binds no sizes here
    return made


class _Writer:
    def __init__(self, graph: Graph, nodes: dict[str, Node], owner: Any) -> None:
        self.graph = graph
        self.nodes = nodes
        self.attributes = {id(_attribute(owner, str(n.target))): n for n in getattr(owner, "graph", Graph()).nodes
                           if n.op == "get_attr"}
        self.copied: dict[Node, Node] = {}

    def add(self, op: Op) -> None:
        """Write an op: its own node again, or for one that a pass added a new node."""
        known = isinstance(op.payload, Node)
        target: Any = op.payload.target if known else op.target.fn
        name = op.out.name if isinstance(op.out, Var) else None
        args, kwargs = self.tree(op.args), self.tree(dict(op.kwargs))
        made = self.graph.create_node("call_function", target, args, kwargs, name)
        made.meta = dict(op.payload.meta) if known else {"val": self.value(made), **_place(op.source)}
        if op.phase is Phase.BW:
            made.meta["partitioner_tag"] = "is_backward"
        if isinstance(op.out, Var):
            self.nodes[op.out.name] = made
            return
        for index, var in enumerate(op.out or ()):
            if isinstance(var, Var):
                part = self.graph.create_node("call_function", operator.getitem, (made, index), name=var.name)
                part.meta = {**made.meta, "val": made.meta["val"][index]}
                self.nodes[var.name] = part

    def value(self, made: Node) -> Any:
        """Return an example of what a new node makes."""
        mode = detect_fake_mode([n.meta.get("val") for n in self.graph.find_nodes(op="placeholder")])
        args, kwargs = map_aggregate((made.args, made.kwargs), lambda a: a.meta["val"] if isinstance(a, Node) else a)
        target: Any = made.target
        with mode or contextlib.nullcontext():
            return target(*args, **kwargs)

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
            source, index = node.args[0], int(node.args[1])  # type: ignore[arg-type]
            if source.op == "call_function" and isinstance(source.meta.get("val"), (tuple, list)):
                parts.setdefault(source, {}).setdefault(index, []).append(node)
    return parts


def _user_tags(node: Node) -> frozenset[Tag]:
    """Return what the user's checkpoints ask of a node.

    What one hands on to forward ops outside it is saved where the backward reads it, as in eager: else a chain of
    checkpoints would be computed again, and held, as a whole.
    """
    policy = node.meta.get("recompute")
    if policy not in RECOMPUTE:
        return frozenset({Tag.SAVE} if policy is CheckpointPolicy.MUST_SAVE else ())
    readers = [reader for user in node.users for reader in (user.users if user.target is operator.getitem else (user,))]
    leaves_checkpoint = any(not _is_backward(reader) and reader.op != "output"
                            and reader.meta.get(CHECKPOINT) != node.meta.get(CHECKPOINT) for reader in readers)
    return frozenset({Tag.SAVE if leaves_checkpoint else Tag.RECOMPUTE})


def _overwritten(nodes: Sequence[Node]) -> set[str]:
    """Return the inputs that AOTAutograd writes to after the forward."""
    written = [desc.mutated_input for desc in nodes[-1].meta.get("desc") or () if hasattr(desc, "mutated_input")]
    return {node.name for node in nodes if node.op == "placeholder" and node.meta.get("desc") in written}


def _count_tokens(placeholders: Sequence[Node]) -> int:
    return sum(type(node.meta.get("desc")).__name__ == "ForwardTokenAOTInput" for node in placeholders)


def _is_tangent(node: Node) -> bool:
    return "tangents" in str(node.target)


def _is_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _name_forward_ops(nodes: Sequence[Node]) -> None:
    """Write on each backward node which forward op it belongs to: the first one that autograd numbered alike.

    A sum of two gradients has the number of the last forward op; it goes with the gradient it adds.
    """
    numbered: dict[Any, str] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        number = node.meta.get("seq_nr")
        if not _is_backward(node):
            numbered.setdefault(number, _target_name(node.meta.get("original_aten") or node.target))
            continue
        read = () if node.meta.get("fwd_source_fn_stack") else node.all_input_nodes
        added = [other for other in read if FORWARD_OP in other.meta]
        node.meta[FORWARD_OP] = added[-1].meta[FORWARD_OP] if added else numbered.get(number, "")


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
    modules = list((node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}).values())
    module = modules[-1][0] if modules else ""
    return Source(os.path.basename(path), int(line), _short(module), node.meta.get(FORWARD_OP, ""), path=path)


def _place(source: Source | None) -> dict[str, Any]:
    """Return the metadata of which `_source` makes `source`."""
    if source is None:
        return {}
    return {"stack_trace": f'File "{source.path}", line {source.line}', "nn_module_stack": {"": (source.module, None)}}


def _short(module: str) -> str:
    return re.sub(r"^L\['self'\]\.?", "", module)

