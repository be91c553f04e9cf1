"""The thunder front end: `thunder.jit(fn, delay_trace_split=True)`.

One table of patches, each falling through to thunder's own where the compile option is absent. All work happens where
thunder builds its gradient trace (or, where nothing needs a gradient, where it transforms for execution); every later
stage passes our traces on as they are. Holds for lightning-thunder 0.2.6.
"""
from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from thunder.core.compile_data import _compile_data, get_compile_data, get_compile_option
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.options import CACHE_OPTIONS
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from thunder.extend import Executor as ThunderExecutor
from thunder.extend import FusionExecutor, OperatorExecutor, get_default_executors, resolve_executors
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from jointtrace.checking.monitor import Monitor, Subject, watched
from jointtrace.checking.program import programs
from jointtrace.checking.thunder_reference import ThunderReference
from jointtrace.compat.patching import Patch, apply_patches
from jointtrace.errors import OptionError
from jointtrace.executors.base import Executor
from jointtrace.executors.registry import resolve
from jointtrace.executors.thunder_fusion import ThunderFusionExecutor
from jointtrace.frontends.thunder_autocast import PATCHES as AUTOCAST_PATCHES
from jointtrace.frontends.thunder_grad_mode import ANSWERS, WITHIN_FUNCTION
from jointtrace.frontends.thunder_python import OPTION
from jointtrace.frontends.thunder_python import PATCHES as PYTHON_PATCHES
from jointtrace.frontends.thunder_traces import (
    ALIASES_LEFT,
    backward_trace,
    forward_trace,
    half_stage_trace,
    release_inputs,
    stage_trace,
)
from jointtrace.frontends.untraceable import compiling, refuse
from jointtrace.joint.build import Joint, build_joint
from jointtrace.joint.lookasides import attribute_of_tensors, lookaside
from jointtrace.joint.places import note_place
from jointtrace.joint.rules import OPERATORS
from jointtrace.joint.symbols import IN_CHECKPOINT
from jointtrace.options import Options
from jointtrace.pipeline import Stage, run
from jointtrace.reporting.dump import recording, write_program, write_stage
from jointtrace.runtime.bridge import connect
from jointtrace.runtime.collector import paused_collector
from jointtrace.runtime.link import link
from jointtrace.runtime.record import Record, add_record
from jointtrace.runtime.split import Halves

DETAILS = "jointtrace"
ATTRIBUTE = "jointtrace_record"  # on our traces, and on the function behind a backward trace


def install() -> None:
    """Attach the front end to thunder; all of it, or on an error nothing."""
    apply_patches(PATCHES)


def options_of(compile_options: Mapping[str, Any]) -> Options | None:
    """Return our options from thunder's compile options; None where the option is absent.

    Raises:
        OptionError: an unknown option or value.
    """
    if OPTION not in compile_options:
        if DETAILS in compile_options:
            raise OptionError(f"{DETAILS}={compile_options[DETAILS]!r} needs {OPTION}=True or {OPTION}=False")
        return None
    late = compile_options[OPTION]
    if not isinstance(late, bool):
        raise OptionError(f"{OPTION}={late!r}; accepted: True, False, or leave it out for thunder as it is")
    details = compile_options.get(DETAILS, {})
    if not isinstance(details, Mapping):
        raise OptionError(f"{DETAILS}={details!r}; accepted: a dict of options")
    return Options.parse(details, late_split=late)


def _jit(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def jit(fn: Any, /, *, executors: Sequence[Any] | None = None, **options: Any) -> Any:
        if OPTION not in options and DETAILS not in options:
            return original(fn, executors=executors, **options)
        ours = options_of(options)
        resolve(ours.executors if ours else None)  # so that an unknown or unavailable one is an error here
        given = resolve_executors(executors if executors is not None else _default_operators())
        options["cache"] = _exact(options.get("cache"))
        with compiling(fn):
            return original(fn, executors=(*given, OPERATORS), **options)

    return jit


def _exact(cache: Any) -> Any:
    """Return thunder's cache option; gradients of thunder's experimental symbolic sizes are wrong for other sizes."""
    if cache is not CACHE_OPTIONS.SYMBOLIC_VALUES and str(cache).lower() != "symbolic values":
        return cache
    warnings.warn('jointtrace compiles for the values it is given: cache="symbolic values" works as "constant values"',
                  stacklevel=3)
    return CACHE_OPTIONS.CONSTANT_VALUES


def _default_operators() -> tuple[ThunderExecutor, ...]:
    """thunder's default executors that run single operations: regions are ours, unless the user names a fuser."""
    return tuple(ex for ex in get_default_executors() if isinstance(ex, OperatorExecutor))


def _region_executors(options: Options, thunder_executors: Sequence[ThunderExecutor]) -> tuple[Executor, ...]:
    asked = [ThunderFusionExecutor(ex) for ex in thunder_executors if isinstance(ex, FusionExecutor)]
    return (*asked, *resolve(options.executors))


def _operators(executors: Sequence[Executor], thunder_executors: Sequence[ThunderExecutor]) -> list[ThunderExecutor]:
    """Return the thunder executors that may claim operations, with those behind our region executors."""
    behind = [getattr(ex, "thunder_executor", None) for ex in executors]
    return [*(ex for ex in behind if ex is not None and ex not in thunder_executors), *thunder_executors]


def compile_computation(computation: TraceCtx, options: Options, *, gradients: bool) -> TraceCtx:
    """Compile a thunder computation trace; return the last joint stage, carrying the record and the forward half."""
    data, stats = _compile_data.get()
    get_compile_option(OPTION, "jointtrace: True splits the joint trace after executors claimed it, False before.")
    get_compile_option(DETAILS, "jointtrace: a dict of further options (executors, disable).")
    get_compile_option(ALIASES_LEFT, "jointtrace resolves aliases itself")
    executors = _region_executors(options, data.executors_list)
    record = Record("thunder", options, executors)
    add_record(stats, record)
    with recording(record), paused_collector():
        write_program(record, computation)
        start = perf_counter()
        joint = build_joint(computation, _operators(executors, data.executors_list), gradients=gradients)
        history = _History(record, stats, computation, joint, perf_counter() - start)
        compiled = run(joint.trace, options, executors, history.note)
        record.depends, record.differentiable = joint.depends, joint.differentiable
        record.written = joint.written.positions
        record.halves = _linked(compiled.halves, executors, record)
    result = stats.last_traces.pop()
    halves = _checked(record, computation, joint, data.executors_list) if options.check else record.halves
    setattr(result, ATTRIBUTE, (record, halves, forward_trace(computation, halves, joint)))
    return result


def _checked(record: Record, computation: TraceCtx, joint: Joint, executors: Sequence[ThunderExecutor]) -> Halves:
    """Return the halves with what checks their first run."""
    halves = record.halves
    assert halves is not None
    found = programs(record.stages)
    reference = ThunderReference(computation, executors, joint)
    monitor = Monitor(Subject(record, lambda: found, reference, halves.forward, halves.backward))
    backward = halves.backward and watched(halves.backward, monitor.before_backward, monitor.after_backward)
    return replace(halves, backward=backward,
                   forward=watched(halves.forward, monitor.before_forward, monitor.after_forward))


@dataclass
class _History:
    """Shows every stage in the lists of traces that thunder's user can print."""

    record: Record
    stats: Any
    computation: TraceCtx
    joint: Joint
    build_seconds: float

    def note(self, stage: Stage) -> None:
        """Add a stage to the record, the dump and thunder's history."""
        if not self.record.stages:
            stage = replace(stage, name="build_joint", seconds=self.build_seconds)
        self.record.stages.append(stage)
        write_stage(self.record, stage)
        if stage.name.endswith("_backward"):
            self.stats.last_backward_traces.append(half_stage_trace(stage.name, stage.trace))
        elif not stage.name.endswith("_forward"):
            self.stats.last_traces.append(stage_trace(self.computation, stage.name, stage.trace, self.joint.names))


def _linked(halves: Halves, executors: Sequence[Executor], record: Record) -> Halves:
    backward = halves.backward and link(halves.backward, executors, record.counters)
    return replace(halves, forward=link(halves.forward, executors, record.counters), backward=backward)


def _grad_transform(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def grad_transform_on_trace(trace: TraceCtx, /, *args: Any, **kwargs: Any) -> TraceCtx:
        options = _active_options()
        if options is None:
            return original(trace, *args, **kwargs)
        return compile_computation(trace, options, gradients=True)

    return grad_transform_on_trace


def _active_options() -> Options | None:
    data = get_compile_data()
    return None if data is None else options_of(data.compile_options)


def _keep(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def keep(trace: TraceCtx, *args: Any, **kwargs: Any) -> Any:
        return trace if hasattr(trace, ATTRIBUTE) else original(trace, *args, **kwargs)

    return keep


def _sort_waits(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_sort_waits(trace: TraceCtx, *args: Any, **kwargs: Any) -> tuple[bool, TraceCtx]:
        return (False, trace) if hasattr(trace, ATTRIBUTE) else original(trace, *args, **kwargs)

    return maybe_sort_waits


def _transform_for_execution(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def transform_for_execution(trace: TraceCtx, executors_list: Sequence[Any], **kwargs: Any) -> list[TraceCtx]:
        if hasattr(trace, ATTRIBUTE):
            return [trace]
        options, data = _active_options(), get_compile_data()
        if options is None or data is None or executors_list is not data.executors_list:  # the prologue is Python's
            return original(trace, executors_list, **kwargs)
        last = compile_computation(trace, options, gradients=False)
        _compile_data.get()[1].last_traces.append(last)
        return [getattr(last, ATTRIBUTE)[2]]

    return transform_for_execution


def _split(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def split_into_forward_and_backward(trace: TraceCtx) -> tuple[TraceCtx, TraceCtx | None]:
        if not hasattr(trace, ATTRIBUTE):
            return original(trace)
        record, halves, forward = getattr(trace, ATTRIBUTE)
        if halves.backward is None:
            return forward, None

        def backward_fn(saved_for_backward: Any, cotangents: Any) -> None: ...

        setattr(backward_fn, ATTRIBUTE, record)
        return forward, backward_trace(halves, backward_fn)

    return split_into_forward_and_backward


def _checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """thunder dissolves a checkpoint while it traces: say of each symbol that it was in one, and keep the order."""

    @functools.wraps(original)
    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        trace = get_jit_ctx().computation_trace
        start = len(trace.bound_symbols)
        result = original(*args, **kwargs)
        if _active_options() is not None:
            inside = trace.bound_symbols[start:]
            del trace.bound_symbols[start:]  # thunder put them first, also where a checkpoint stands in another one
            for bsym in inside:
                bsym.tags.add(IN_CHECKPOINT)
            trace.scopes[-1].extend(inside)
        return result

    return checkpoint


def _insert_alias_updates(original: Callable[..., Any]) -> Callable[..., Any]:
    """In-place operations come to us as the user wrote them; which arguments share memory stays part of the cache."""

    @functools.wraps(original)
    def insert_alias_updates(trace: TraceCtx, *args: Any) -> TraceCtx:
        return original(trace, *args) if _active_options() is None else trace

    return insert_alias_updates


def _tensorproxy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def tensorproxy(tensor: torch.Tensor, /, **kwargs: Any) -> TensorProxy:
        return note_place(original(tensor, **kwargs), tensor)

    return tensorproxy


def _del_last_used(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def del_last_used(trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        deleted = original(trace, **kwargs)
        return deleted if _active_options() is None else release_inputs(deleted)

    return del_last_used


def _connect(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def connect_to_autograd(*, backward_fn: Callable[..., Any], **kwargs: Any) -> None:
        if ATTRIBUTE not in backward_fn.__dict__:
            backward_fn.__dict__[ATTRIBUTE] = _record_behind(backward_fn)
        record: Record | None = backward_fn.__dict__[ATTRIBUTE]
        if record is None:
            return original(backward_fn=backward_fn, **kwargs)
        return connect(
            backward_fn, kwargs["flat_args"], kwargs["flat_output"], kwargs["saved_tensors"], kwargs["saved_other"],
            differentiable=record.differentiable, depends=record.depends, written=record.written,
            drop_grads=kwargs["return_none_instead_of_grads"],
        )

    return connect_to_autograd


def _record_behind(backward_fn: Callable[..., Any]) -> Record | None:
    behind = inspect.unwrap(backward_fn).__globals__.get("__function_obj")
    return getattr(behind, ATTRIBUTE, None)


def _lookaside(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def general_jit_lookaside(fn: Any, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
        ours = None
        if isinstance(fn, Hashable) and _active_options() is not None and fn not in OPERATORS._lookasides:
            ours = ANSWERS.get(fn) or lookaside(fn, (*args, *kwargs.values()))
        return ours or original(fn, *args, **kwargs)

    return general_jit_lookaside


def _default_attribute(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_default_attr(tensor: TensorProxy, attribute: str, /) -> Any:
        found = original(tensor, attribute)
        return attribute_of_tensors(attribute) if found is None and _active_options() is not None else found

    return get_default_attr


def _set_buffer(original: Callable[..., Any]) -> Callable[..., Any]:
    """thunder calls a buffer of the root module ".name", and never finds again what it was set to."""

    @functools.wraps(original)
    def set_buffer(module: Any, name: str, value: Any) -> None:
        original(module, name.lstrip("."), value)

    return set_buffer


PATCHES = (
    Patch("thunder.core.module.ThunderModule", "set_buffer", _set_buffer),
    Patch("thunder", "jit", _jit),
    Patch("thunder", "_with_cache_info_ctx", refuse),
    Patch("thunder.core.jit_ext", "general_jit_lookaside", _lookaside),
    Patch("thunder.core.proxies", "tensorproxy", _tensorproxy),
    Patch("thunder.core.proxies.TensorProxy", "get_default_attr", _default_attribute),
    Patch("thunder", "insert_alias_updates", _insert_alias_updates),
    Patch("thunder.transforms.autodiff", "grad_transform_on_trace", _grad_transform),
    Patch("thunder.executors.passes", "_transform_for_operator_executor_execution", _keep),
    Patch("thunder.distributed.utils", "maybe_sort_waits", _sort_waits),
    Patch("thunder", "transform_for_execution", _transform_for_execution),
    Patch("thunder.transforms.autodiff", "split_into_forward_and_backward", _split),
    Patch("thunder.executors.passes", "del_last_used", _del_last_used),
    Patch("thunder", "connect_to_autograd", _connect),
    Patch("thunder.core.jit_ext", "_general_jit_lookaside_map", _checkpoint, item=lambda: torch_checkpoint),
    WITHIN_FUNCTION,
    *PYTHON_PATCHES,
    *AUTOCAST_PATCHES,
)
