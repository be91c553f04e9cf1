"""The torch.compile front end: `torch.compile(model, backend="jointtrace")`, below AOTAutograd.

AOTAutograd hands over one joint graph in which views, mutation, autocast, random state, DTensors and output metadata
are resolved. `partition` turns it into a joint trace, takes it through the passes and hands plain halves back; what
AOTAutograd then makes of each half is converted again, its regions are formed, compiled and run by generated code.
Holds for torch 2.10 to 2.14: `aot_autograd`, `_extract_fwd_bwd_modules`, Inductor's decomposition table.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from jointtrace.executors.base import Executor
from jointtrace.executors.registry import resolve
from jointtrace.ir.fx import to_joint_graph, to_trace
from jointtrace.ir.op import TensorType
from jointtrace.options import Options
from jointtrace.passes.dce import dce
from jointtrace.passes.recompute import saved
from jointtrace.pipeline import PASSES, Stage, run
from jointtrace.regions.fuse import fuse
from jointtrace.runtime.codegen import compile_trace
from jointtrace.runtime.link import link
from jointtrace.runtime.record import Record
from jointtrace.runtime.split import Halves

IMPROVED = frozenset({"joint", *(name for name, _ in PASSES)}) - {"fuse"}  # stages that hold a joint trace of plain ops

NODE = "CompiledFunctionBackward"  # AOTAutograd's autograd function


def backend(module: GraphModule, example_inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """Compile a Dynamo graph; the backend that torch.compile finds as "jointtrace".

    Args:
        module: the graph Dynamo captured.
        example_inputs: its inputs, fake or real.
        given: `options={...}` of torch.compile, the fields of `Options`; `mode` is accepted and ignored.
    """
    options = Options.parse(given.get("options") or {})
    return Session(options).compile(module, example_inputs)


class Session:
    """One graph on its way: the record it fills, and the executors that claim its regions."""

    def __init__(self, options: Options) -> None:
        self.executors: tuple[Executor, ...] = resolve(options.executors)
        self.record = Record("dynamo", options, self.executors)
        self.options = options

    def compile(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the compiled graph."""
        from torch._dynamo.backends.common import aot_autograd

        compiler = aot_autograd(
            fw_compiler=self.half, bw_compiler=self.half, inference_compiler=self.half, partition_fn=self.partition,
            decompositions=self.decompositions(),
        )
        compiled = compiler(module, example_inputs)
        halves = self.record.halves
        partial = halves is not None and _table(halves, self.record.depends)
        return _with_missing_gradients(compiled, partial) if partial else compiled

    def decompositions(self) -> Mapping[Any, Any]:
        """Return what is decomposed before executors claim: Inductor's table where it compiles, else nothing."""
        if not any(executor.fuses for executor in self.executors):
            return {}
        from torch._inductor.decomposition import select_decomp_table

        return select_decomp_table()

    def partition(
        self, joint: GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Improve a joint graph and return its halves, as AOTAutograd's `partition_fn`."""
        from torch._functorch.partitioners import _extract_fwd_bwd_modules

        joint.graph.eliminate_dead_code()
        trace = to_trace(joint, num_fwd_outputs).trace
        compiled = run(trace, self.options, self.executors, self.note)
        self.record.depends, self.record.halves = compiled.depends, compiled.halves
        trace = next(s.trace for s in reversed(compiled.stages) if s.name in IMPROVED)
        whole, nodes = to_joint_graph(trace, joint)
        names = saved(trace)
        tensors = [nodes[name] for name in names if isinstance(trace.types[name], TensorType)]
        others = [nodes[name] for name in names if not isinstance(trace.types[name], TensorType)]
        return _extract_fwd_bwd_modules(whole, tensors, others, num_fwd_outputs=num_fwd_outputs)

    def half(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Compile one half, or a graph without gradients, to a boxed function."""
        trace = dce(to_trace(module).trace)
        if "fuse" not in self.options.disable:
            trace = fuse(trace, self.executors)
        call = compile_trace(link(trace, self.executors, self.record.counters))
        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def note(self, stage: Stage) -> None:
        """Add a stage to the record."""
        self.record.stages.append(stage)


def _table(halves: Halves, depends: Sequence[frozenset[int]]) -> tuple[frozenset[int], ...] | None:
    """Return for each tensor input the outputs its gradient depends on; None where every gradient depends on all."""
    existing = frozenset(i for i, name in enumerate(halves.cotangents) if name is not None)
    types = halves.forward.types
    table = tuple(d for name, d in zip(halves.forward.inputs, depends, strict=True) if isinstance(types[name], TensorType))
    return table if any(d and d != existing for d in table) else None


def _with_missing_gradients(compiled: Callable[..., Any], table: tuple[frozenset[int], ...]) -> Callable[..., Any]:
    """Return `compiled` with None, as in eager, for a gradient none of whose cotangents exists; AOTAutograd has zeros."""

    def hook(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        missing = {i for i, grad in enumerate(grad_outputs) if grad is None}
        if not missing or len(grad_inputs) != len(table):
            return None
        return tuple(None if d and d <= missing else grad for d, grad in zip(table, grad_inputs, strict=True))

    def call(*args: Any) -> Any:
        results = compiled(*args)
        node = next((found for found in map(_compiled_node, results) if found is not None), None)
        if node is not None:
            node.register_hook(hook)
        return results

    return call


def _compiled_node(result: Any) -> Any:
    """Return the autograd node of the compiled function behind one of its results, through the view it may be."""
    node = result.grad_fn if isinstance(result, torch.Tensor) else None
    while node is not None and node.name() != NODE:
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return node
