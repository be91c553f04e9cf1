"""torch_compile: regions through Inductor.

A region compiles at its first call, once for each set of input strides: the front end does not fix them, and Inductor's
code is made for one set. Shapes, dtypes and devices are those of the region's types, and a number read at run time is a
constant of the code, so another value compiles again. Outputs have the strides and the aliasing they have in eager.

Private parts of torch (2.10 to 2.14) are touched in this file only: `make_fx`, and from `torch._inductor` the
decomposition table, the joint-graph passes, `compile_fx_inner` and the search for a C++ compiler.
"""
from __future__ import annotations

import contextlib
import functools
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from jointtrace.errors import UnsupportedError
from jointtrace.executors.base import Compiled, Executor, gains
from jointtrace.executors.inductor_dry_run import Sample, dry_run
from jointtrace.executors.parts import with_parts
from jointtrace.ir.draw import RUN_AS_THEY_STAND
from jointtrace.ir.fx import to_region_graph
from jointtrace.ir.op import NEVER_FUSED, Op, Phase, ScalarType, TensorType, Type, Var, leaves
from jointtrace.ir.trace import Trace
from jointtrace.runtime.codegen import compile_trace

DEVICES = ("cpu", "cuda")
CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(...))
OPS_NAMED_IN_ERRORS = 12
MODES = ("default", "max-autotune-no-cudagraphs")  # of torch.compile: those that need no CUDA graphs

Boxed = Callable[[list[Any]], Sequence[Any]]
_strides = torch.Tensor.stride


class TorchCompileExecutor:
    """Claims tensor ops on one CPU or CUDA device and compiles regions of them with Inductor."""

    name = "torch_compile"
    fuses = True

    def __init__(self, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.settings = settings  # of Inductor, for regions of graphs

    def unavailable(self) -> str | None:
        """Return what is missing to compile C++ code."""
        return _missing_toolchain()

    def can_run(self, op: Op, types: Mapping[str, Type]) -> bool:
        """Pure ops over tensors and numbers."""
        if op.target.fn in (None, *RUN_AS_THEY_STAND) or op.body is not None or op.tags & NEVER_FUSED:
            return False
        if not all(isinstance(leaf, (Var, *CONSTANTS)) for leaf in leaves((op.args, dict(op.kwargs)))):
            return False
        read_well = all(_is_compilable(types.get(name), number=True) for name in op.ins)
        return read_well and all(_is_compilable(types.get(name), number=False) for name in op.outs)

    def wants(self, ops: Sequence[Op]) -> bool:
        """A group that saves something."""
        return gains(ops)

    def compile(self, region: Op) -> Compiled:
        """Return the region as a callable that compiles when it is called."""
        body = region.body
        if body is None:
            raise ValueError(f"{region.target.name} is no region")
        if all(isinstance(op.payload, torch.fx.Node) for op in body.ops):
            return GraphRegion(region, self.settings)
        return InductorRegion(region.target.name, body, is_backward=region.phase is Phase.BW)


@functools.cache
def in_mode(executor: Executor, mode: str) -> Executor:
    """Return `executor` with the settings of a mode of torch.compile; as it is where it has none to make."""
    if mode == "default" or not isinstance(executor, TorchCompileExecutor):
        return executor
    from torch._inductor import list_mode_options

    return TorchCompileExecutor(MappingProxyType(list_mode_options(mode)))


class InductorRegion:
    """One region: a compiled function for each set of input strides seen so far."""

    def __init__(self, name: str, body: Trace, *, is_backward: bool) -> None:
        self.name = name
        self.body = body
        self.is_backward = is_backward
        self.variants: dict[tuple[Any, ...], Boxed] = {}
        self.key = _layout_key if _only_strides_vary(body) else _full_key

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Run the region."""
        return self.boxed(list(args))

    def boxed(self, args: list[Any]) -> tuple[Any, ...]:
        """Run the region on `args`, which it empties."""
        key = self.key(args)
        variant = self.variants.get(key)
        if variant is None:
            variant = self._compile(key, args)
        return variant(args)  # type: ignore[return-value]  Inductor's code returns a tuple

    def dry_run(self, args: Sequence[Any], sample: Sample) -> Boxed | None:
        """Return the code for inputs like `args` for tensors without memory; None where it is not compiled yet.

        The only variant there is stands for layouts that the caller does not know.
        """
        known = [*self.variants.values()]
        variant = self.variants.get(self.key(list(args)), known[0] if len(known) == 1 else None)
        return _dry(variant, sample) if variant is not None else None

    def _compile(self, key: tuple[Any, ...], args: list[Any]) -> Boxed:
        from torch._dynamo.convert_frame import compile_lock

        with compile_lock:
            if key not in self.variants:  # else another thread was faster
                try:
                    self.variants[key] = compile_with_inductor(self.body, args, is_backward=self.is_backward)
                except Exception as error:
                    raise UnsupportedError(self._failure(error)) from error
            return self.variants[key]

    def _failure(self, error: Exception) -> str:
        return failure(self.name, self.body, error)


class GraphRegion:
    """A region of a graph whose input layouts AOTAutograd fixes: compiled at once, sizes unknown to it included."""

    def __init__(self, region: Op, settings: Mapping[str, Any]) -> None:
        from torch._inductor import config

        body = region.body
        assert body is not None
        graph, examples = to_region_graph(body)
        try:
            with config.patch(dict(settings)):
                self.boxed = compile_graph(graph, examples, is_backward=region.phase is Phase.BW)
        except Exception as error:
            raise UnsupportedError(failure(region.target.name, body, error)) from error

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Run the region."""
        return tuple(self.boxed(list(args)))

    def dry_run(self, args: Sequence[Any], sample: Sample) -> Boxed | None:
        """Return the code of the region for tensors without memory; None where it is no Python code."""
        return _dry(self.boxed, sample)


def failure(name: str, body: Trace, error: Exception) -> str:
    """Return what to tell the user of a region that Inductor cannot compile."""
    ops = body.ops
    named = [op.target.name + (f" ({op.source})" if op.source else "") for op in ops[:OPS_NAMED_IN_ERRORS]]
    if len(ops) > len(named):
        named.append(f"and {len(ops) - len(named)} more")
    return (
        f"Inductor failed on region {name} of {len(ops)} ops: {', '.join(named)}; "
        f"{type(error).__name__}: {error}; run it with executors=('eager',) instead"
    )


def compile_with_inductor(body: Trace, args: Sequence[Any], *, is_backward: bool) -> Boxed:
    """Return `body` compiled for inputs like `args`: takes one list of inputs, empties it, returns the outputs.

    Numbers among `args` become constants. The steps are those of torch.compile below its partitioner: decompose to a
    functional graph, improve it by the joint-graph passes, generate code.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode

    tensors = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    cuda = sorted({args[i].device.index for i in tensors if args[i].is_cuda})
    with _plain_torch(), torch.random.fork_rng(cuda):  # tracing draws from the user's generators
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)  # constants that torch makes itself
        with fake_mode:
            fakes = [_like(args[i]) for i in tensors]
        with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode):
            graph = _functional_graph(_with_numbers(body, args, tensors), fakes)
    run = compile_graph(graph, fakes, is_backward=is_backward)
    return run if len(tensors) == len(args) else _emptying(run, tensors)


def compile_graph(graph: torch.fx.GraphModule, examples: Sequence[Any], *, is_backward: bool) -> Boxed:
    """Return a functional graph of decomposed operators compiled for `examples`, fake tensors and sizes of one mode.

    Every output keeps the layout it has in the graph: other regions were planned on it.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    fake_mode = detect_fake_mode(examples)
    # a context of its own: AOTAutograd's would take the strides of this region's outputs for those of the whole half
    with _plain_torch(), tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode):
        graph = with_parts(graph, fake_mode)
        _keep_outputs_apart(graph.graph)
        shared = _outputs_that_share(graph.graph)
        graph = joint_graph_passes(graph)
        outputs = graph.graph.output_node()
        outputs.meta["user_visible_output_idxs"] = list(range(len(outputs.args[0])))  # type: ignore[arg-type]
        compiled = compile_fx_inner(graph, examples, is_backward=is_backward)
    inner = getattr(compiled, "current_callable", None) or compiled  # without the wrapper for torch's metrics
    calls = any(node.op == "call_function" for node in graph.graph.nodes)
    run = inner if calls else _emptying(inner, list(range(len(examples))))
    return _with_aliases(run, shared) if shared else run


def _keep_outputs_apart(graph: torch.fx.Graph) -> None:
    """Let the first of several outputs that are copies of one value be that value.

    Inductor (torch 2.10 to 2.14) takes away a copy of what is no output itself, and would return one memory twice.
    """
    output = graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    owned = {_memory(node) for node in (*graph.find_nodes(op="placeholder"), *outputs)}
    copies: dict[Any, list[int]] = {}
    for position, out in enumerate(outputs):
        origin = out
        while isinstance(origin, torch.fx.Node) and origin.target is torch.ops.aten.clone.default:
            origin = origin.args[0]
        if origin is not out and _memory(origin) not in owned:
            copies.setdefault(origin, []).append(position)
    for origin, positions in copies.items():
        value = origin.meta["val"]
        alike = [p for p in positions if outputs[p].meta["val"].stride() == value.stride()]
        if len(positions) > 1 and alike:
            copy = outputs[alike[0]]
            outputs = [origin if out is copy else out for out in outputs]
    output.args = (tuple(outputs),)


def _outputs_that_share(graph: torch.fx.Graph) -> list[int]:
    """Return the positions of the outputs that share memory with an input or an earlier output."""
    seen = {_memory(node) for node in graph.find_nodes(op="placeholder")} - {None}
    outputs: Any = graph.output_node().args[0]
    shared = []
    for position, memory in enumerate(map(_memory, outputs)):
        if memory in seen:
            shared.append(position)
        elif memory is not None:
            seen.add(memory)
    return shared


def _with_aliases(run: Boxed, shared: list[int]) -> Boxed:
    """Return `run` with new tensors where Inductor may return one that is another's: each has a history of its own."""

    def with_aliases(args: list[Any]) -> Sequence[Any]:
        outputs = list(run(args))
        for position in shared:
            outputs[position] = outputs[position].detach()
        return tuple(outputs)

    return _around(with_aliases, run, lambda inner: _with_aliases(inner, shared))


def _memory(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _functional_graph(fn: Callable[..., tuple[Any, ...]], fakes: list[torch.Tensor]) -> torch.fx.GraphModule:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = torch.func.functionalize(fn, remove="mutations")
    graph = make_fx(functional, decomposition_table=select_decomp_table())(*fakes)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _with_numbers(body: Trace, args: Sequence[Any], tensors: list[int]) -> Callable[..., tuple[Any, ...]]:
    """Return `body` as a function of its tensors alone."""
    fn = compile_trace(body, "region", boxed=False)
    values = list(args)

    def with_numbers(*given: torch.Tensor) -> tuple[Any, ...]:
        for i, tensor in zip(tensors, given, strict=True):
            values[i] = tensor
        return fn(*values)

    return with_numbers


def _emptying(run: Boxed, tensors: list[int]) -> Boxed:
    """Return `run` for arguments of which only `tensors` are its own (a graph without calls empties no list)."""

    def emptying(args: list[Any]) -> Sequence[Any]:
        kept = [args[i] for i in tensors]
        args.clear()
        return run(kept)

    return _around(emptying, run, lambda inner: _emptying(inner, tensors))


def _around(outer: Boxed, inner: Boxed, again: Callable[[Boxed], Boxed]) -> Boxed:
    """Return `outer`, which says what it wraps and how to wrap that again."""
    outer.around = inner, again  # type: ignore[attr-defined]
    return outer


def _dry(run: Boxed, sample: Sample) -> Boxed | None:
    """Return a region's code for tensors without memory, wrapped as the region is."""
    if not hasattr(run, "around"):
        return dry_run(run, sample)
    inner, again = run.around  # type: ignore[attr-defined]
    dry = _dry(inner, sample)
    return again(dry) if dry is not None else None


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """Turn off what the user may have on where the first call happens: gradients, autocast, modes."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch.no_grad(), torch._C._DisableAutocast(), _disable_current_modes():
        yield


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _layout_key(args: list[Any]) -> tuple[Any, ...]:
    return tuple(map(_strides, args))


def _full_key(args: list[Any]) -> tuple[Any, ...]:
    return tuple((a.shape, a.stride()) if isinstance(a, torch.Tensor) else (type(a), a) for a in args)


def _only_strides_vary(body: Trace) -> bool:
    types = [body.types.get(name) for name in body.inputs]
    return all(isinstance(t, TensorType) and all(isinstance(size, int) for size in t.shape) for t in types)


def _is_compilable(type_: Type | None, *, number: bool) -> bool:
    if isinstance(type_, ScalarType):
        return number
    if not isinstance(type_, TensorType) or type_.dtype.is_complex:  # Inductor generates no complex code
        return False
    return type_.device.partition(":")[0] in DEVICES


@functools.cache
def _missing_toolchain() -> str | None:
    """Return what Inductor would miss to compile C++ code: a compiler, or Python's headers."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError, OSError):
        return "no C++ compiler; install one (Debian and Ubuntu: apt-get install g++) or name it in the variable CXX"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.is_file():
        return f"{headers} is missing; install Python's headers (Debian and Ubuntu: apt-get install python3-dev)"
    return None
