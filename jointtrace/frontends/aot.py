"""The torch.compile front end: `torch.compile(model, backend="jointtrace")`, below AOTAutograd.

AOTAutograd hands over one joint graph in which views, mutation, autocast, random state, DTensors and output metadata
are resolved. `partition` turns it into a joint trace, takes it through the passes and hands plain halves back; what
AOTAutograd then makes of each half is converted again, its regions are formed, compiled and run by generated code. So
regions are claimed on the halves, and `late_split` is no option here.
Holds for torch 2.10 to 2.14: `aot_autograd`, `_extract_fwd_bwd_modules`, Inductor's decomposition table, the setting
`donated_buffer`, the name of AOTAutograd's node and its `_double_backward`, the numbers autograd gives to nodes.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch.fx import GraphModule

from jointtrace.checking.graph_check import GraphCheck
from jointtrace.compat.scalar_writes import kept_scalar_writes
from jointtrace.errors import OptionError
from jointtrace.executors.base import Executor
from jointtrace.executors.registry import resolve
from jointtrace.executors.torch_compile import MODES, in_mode
from jointtrace.frontends.origin import watched
from jointtrace.ir.fx import to_joint_graph, to_trace
from jointtrace.ir.op import Phase, ScalarType, TensorType, Type, Var, var_names
from jointtrace.ir.sizes import bind_sizes
from jointtrace.ir.trace import Trace
from jointtrace.ir.verify import verify
from jointtrace.options import Options
from jointtrace.passes.dce import dce
from jointtrace.passes.recompute import saved
from jointtrace.pipeline import PASSES, Compiled, Stage, run
from jointtrace.regions.fuse import fuse
from jointtrace.reporting.dump import write_half, write_stage
from jointtrace.reporting.registry import own
from jointtrace.runtime.codegen import compile_trace
from jointtrace.runtime.collector import paused_collector
from jointtrace.runtime.link import link
from jointtrace.runtime.record import Record
from jointtrace.runtime.second_derivative import anchors, leaves, without_second_derivative

IMPROVED = frozenset({"joint", *(name for name, _ in PASSES)}) - {"fuse"}  # stages that hold a joint trace of plain ops

REMAT = "remat_using_tags_for_fwd_loss_bwd_graph"  # of torch 2.13 and later
NODE = "CompiledFunctionBackward"  # AOTAutograd's autograd function

Boxed = Callable[[list[Any]], Any]
Hook = Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...] | None]


def backend(module: GraphModule, example_inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """Compile a Dynamo graph; the backend that torch.compile finds as "jointtrace".

    Args:
        module: the graph Dynamo captured.
        example_inputs: its inputs, fake or real.
        given: of torch.compile: `options={...}`, the fields of `Options` and "mode"; or `mode`, one of `MODES`.

    Raises:
        OptionError: an unknown option, value or mode (Dynamo wraps it; `jointtrace.compile` raises it at once).
    """
    session = Session(*options_of(**given))
    with watched(session.record, module):
        return session.compile(module, example_inputs)


def options_of(*, options: Mapping[str, Any] | None = None, mode: str | None = None) -> tuple[Options, str]:
    """Return the options and the mode that torch.compile was given, which takes `mode` alone or among the options.

    Raises:
        OptionError: an unknown option, value or mode.
    """
    given = {**(options or {})}
    mode = mode or given.pop("mode", None) or "default"
    if mode not in MODES:
        raise OptionError(f"mode={mode!r}; accepted: {', '.join(MODES)} (none makes CUDA graphs)")
    return Options.parse(given), mode


class Session:
    """One graph on its way: the record it fills, and the executors that claim its regions."""

    def __init__(self, options: Options, mode: str = "default") -> None:
        self.executors: tuple[Executor, ...] = tuple(in_mode(ex, mode) for ex in resolve(options.executors))
        self.record = Record("dynamo", options, self.executors)
        self.options = options
        self.check = GraphCheck(self.record) if options.check else None
        self.fuses = any(executor.fuses for executor in self.executors)
        self.missing: Hook | None = None  # makes gradients that AOTAutograd has as zeros None

    def compile(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the compiled graph."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch import config

        compiler = aot_autograd(
            fw_compiler=self.forward, bw_compiler=self.backward, inference_compiler=self.inference,
            partition_fn=self.partition, decompositions=self.decompositions(),
        )
        # donated buffers would forbid a second backward, and no region writes to what it is given
        settings = {"donated_buffer": False}
        if hasattr(config, REMAT) and not any(node.target is torch.autograd.grad for node in module.graph.nodes):
            settings[REMAT] = False  # refuses draws in a checkpoint also where nothing is to be computed again
        with config.patch(settings), kept_scalar_writes():
            compiled = compiler(module, example_inputs)
        halves = self.record.halves
        return compiled if halves is None or halves.backward is None else _with_eagers_gradients(compiled, self.missing)

    def decompositions(self) -> Mapping[Any, Any]:
        """Return what is decomposed before executors claim: Inductor's table where it compiles, else nothing."""
        if not self.fuses:
            return {}
        from torch._inductor.decomposition import select_decomp_table

        return select_decomp_table()

    def partition(
        self, joint: GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Improve a joint graph and return its halves, as AOTAutograd's `partition_fn`."""
        from torch._functorch.partitioners import _extract_fwd_bwd_modules

        joint.graph.eliminate_dead_code()
        converted = to_trace(joint, num_fwd_outputs)
        trace = self.noted(converted.trace)
        if self.options.check:
            self.check = GraphCheck(self.record, joint, trace)
        with paused_collector():
            compiled = run(trace, self.options, self.executors, self.note)
        self.record.depends, self.record.halves = compiled.depends, compiled.halves
        self.missing = _missing(compiled, converted.tokens)
        trace = next(s.trace for s in reversed(compiled.stages) if s.name in IMPROVED)
        whole, nodes = to_joint_graph(trace, joint)
        names = saved(trace)
        numbers = [nodes[name] for name in names if isinstance(trace.types[name], ScalarType)]
        tensors = [nodes[name] for name in names if not isinstance(trace.types[name], ScalarType)]
        return _extract_fwd_bwd_modules(whole, tensors, numbers, num_fwd_outputs=num_fwd_outputs)

    def forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a forward half, as AOTAutograd's `fw_compiler`."""
        return self.half(module, Phase.FW)

    def backward(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a backward half, as AOTAutograd's `bw_compiler`, which it calls when a backward first runs."""
        from torch._dynamo.convert_frame import compile_lock

        with compile_lock:
            return self.half(module, Phase.BW)

    def inference(self, module: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a graph without gradients, as AOTAutograd's `inference_compiler`."""
        with paused_collector():
            compiled = run(self.noted(to_trace(module).trace), self.options, self.executors, self.note)
        self.record.depends, self.record.halves = compiled.depends, compiled.halves
        return self.boxed(bind_sizes(compiled.halves.forward), "inference")

    def half(self, module: GraphModule, phase: Phase) -> Boxed:
        """Compile one half, as AOTAutograd hands it over: it may have rewritten what `partition` made."""
        with paused_collector():
            trace = dce(self.noted(to_trace(module, phase=phase).trace))
            if self.check is not None:
                self.check.add_half(phase, trace)
            if "fuse" not in self.options.disable:
                trace = self.fused(trace, phase)
            trace = bind_sizes(trace)
            verify(trace, f"AOTAutograd, the {phase.value} half")
        halves = self.record.halves
        if halves is not None and phase is Phase.FW:
            kept = dict.fromkeys(var_names(trace.outputs[len(halves.cotangents):]))
            self.record.halves = replace(halves, forward=trace, saved=tuple(kept))
        elif halves is not None:
            self.record.halves = replace(halves, backward=trace)
        return self.boxed(trace, "forward" if phase is Phase.FW else "backward")

    def fused(self, trace: Trace, phase: Phase) -> Trace:
        """Form the regions of a half; a stage of its own, which the report counts among the passes."""
        start = perf_counter()
        trace = fuse(trace, self.executors)
        name = "fuse_forward" if phase is Phase.FW else "fuse_backward"
        self.note(Stage(name, trace, perf_counter() - start, len(trace.ops)))
        return trace

    def boxed(self, trace: Trace, name: str) -> Boxed:
        """Return a trace as the function that runs: takes one list of arguments, which it empties."""
        linked = link(trace, self.executors, self.record.counters)
        call = compile_trace(linked, name)
        if self.check is not None:
            call = self.check.watch(call, linked, Phase.BW if name == "backward" else Phase.FW)
        call._boxed_call = True  # type: ignore[attr-defined]  AOTAutograd's sign for it
        write_half(self.record, name, trace)
        own(call, self.record)
        return call

    def noted(self, trace: Trace) -> Trace:
        """Return `trace` with what was settled before any pass saw it."""
        return replace(trace, notes={"decompositions": "Inductor's" if self.fuses else "none"})

    def note(self, stage: Stage) -> None:
        """Add a stage to the record."""
        self.record.stages.append(stage)
        write_stage(self.record, stage)


def _missing(compiled: Compiled, tokens: int) -> Hook | None:
    """Return a hook of AOTAutograd's node that turns zeros into None where eager has None.

    That is a gradient none of whose cotangents exists. The hook itself is None where all depend on every cotangent that
    there may be, one that the backward does not read among them.
    """
    halves = compiled.halves
    types = halves.forward.types
    differentiable = frozenset(i - tokens for i, out in enumerate(halves.forward.outputs[:len(halves.cotangents)])
                               if isinstance(out, Var) and _may_have_gradient(types[out.name]))
    table = tuple(frozenset(i - tokens for i in positions)
                  for name, positions in zip(halves.forward.inputs[tokens:], compiled.depends[tokens:], strict=True)
                  if isinstance(types[name], TensorType))
    outputs = len(halves.cotangents) - tokens

    def hook(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        missing = {i for i, grad in enumerate(grad_outputs) if grad is None}
        # other numbers than the graph's where tensor subclasses, which AOTAutograd takes apart, are among them
        if not missing or len(grad_inputs) != len(table) or len(grad_outputs) != outputs:
            return None
        return tuple(None if d and d <= missing else grad for d, grad in zip(table, grad_inputs, strict=True))

    return hook if any(d and d != differentiable for d in table) else None


def _may_have_gradient(kind: Type) -> bool:
    return isinstance(kind, TensorType) and (kind.dtype.is_floating_point or kind.dtype.is_complex)


def _with_eagers_gradients(compiled: Callable[..., Any], hook: Hook | None) -> Callable[..., Any]:
    """Return `compiled` with `hook` on the autograd node of each call, and second derivatives that raise."""
    guarded: set[type] = set()

    def call(*args: Any) -> Any:
        start, histories = _get_sequence_nr(), anchors(args)
        results = compiled(*args)
        if hook is None and not histories and guarded:
            return results
        node = _node_since(start, (*results, *args))
        if node is not None:
            if hook is not None:
                node.register_hook(hook)
            node.jointtrace_anchors = histories
            if type(node) not in guarded:
                guarded.add(type(node))
                _guard_second_derivative(type(node)._forward_cls)
        return results

    return call


def _guard_second_derivative(function: Any) -> None:
    """Let AOTAutograd's function tie gradients that have a graph to all arguments; it ties them to what was saved."""
    original = getattr(function, "_double_backward", None)
    if original is None:
        return

    def double_backward(ctx: Any, *args: Any) -> tuple[Any, ...]:
        grads = original(ctx, *args)
        sources = [*leaves(ctx), *getattr(ctx, "jointtrace_anchors", ())]
        return tuple(without_second_derivative(grads, sources))

    function._double_backward = staticmethod(double_backward)


def _node_since(start: int, tensors: Sequence[Any]) -> Any:
    """Return AOTAutograd's node behind one of `tensors`, through views and writes; older nodes are not its."""
    todo = [t.grad_fn for t in reversed(tensors) if isinstance(t, torch.Tensor) and not t.is_leaf]
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen or node._sequence_nr() < start:
            continue
        if node.name() == NODE:
            return node
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
    return None
