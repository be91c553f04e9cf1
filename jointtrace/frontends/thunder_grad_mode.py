"""The gradient mode that a program asks for and sets while thunder traces it.

thunder 0.2.6 answers with the mode of the process, so that a `torch.no_grad` block within another one turns gradients
on as it ends; and it enters `torch.inference_mode` without telling its trace. Either leaves a wrong gradient, silently.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import (
    WrappedValue,
    _interpret_call,
    get_interpreterruntimectx,
    interpreter_needs_wrap,
    unwrap,
    wrap_const,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.trace import get_tracectx
from torch.autograd.graph import saved_tensors_hooks

from jointtrace.compat.function_apply import rule_key
from jointtrace.compat.patching import Patch
from jointtrace.errors import UnsupportedError

ATTRIBUTE = "jointtrace_modes"  # on thunder's context of one tracing


@dataclass
class Function:
    """An `autograd.Function` amid its forward or backward, where nothing is differentiated: its mode goes with it."""

    depth: int  # of the trace's scopes around it
    enabled: bool = False


class Modes:
    """The modes that a program is amid, innermost last."""

    def __init__(self) -> None:
        self.functions: list[Function] = []
        self.before_inference: list[tuple[bool, bool]] = []  # gradient mode and inference mode
        self.inference = torch.is_inference_mode_enabled()
        self.history: Any = None  # of the last answer whether a tensor requires a gradient


def modes() -> Modes:
    """Return the modes of the program that thunder traces."""
    context: Any = get_jit_ctx()
    return vars(context).setdefault(ATTRIBUTE, Modes())


def _is_grad_enabled() -> bool:
    functions = modes().functions
    data: Any = get_compile_data()
    return functions[-1].enabled if functions else data.is_grad_enabled


def _set_grad_enabled(enabled: bool) -> None:
    functions = modes().functions
    if functions:
        functions[-1].enabled = enabled
    else:
        ltorch._set_grad_enabled_with_warning(enabled)


def _enter_inference_mode(block: WrappedValue) -> Any:
    """Turn gradients off, or on with `inference_mode(False)`; what comes of it is no inference tensor."""
    mode: bool = unwrap(_interpret_call(getattr, block, wrap_const("mode")))  # thunder keeps it outside of the block
    now = modes()
    now.before_inference.append((_is_grad_enabled(), now.inference))
    now.inference = mode
    _set_grad_enabled(not mode)
    return wrap_const(None)


def _leave_inference_mode(block: torch.inference_mode, *error: Any) -> None:
    now = modes()
    enabled, now.inference = now.before_inference.pop()
    _set_grad_enabled(enabled)


def _refuse_hooks(block: saved_tensors_hooks) -> None:
    context: Any = get_interpreterruntimectx()
    file, position = context.get_current_user_source_location()
    raise UnsupportedError(f"{type(block).__name__} ({file}:{position.lineno}): what is saved is chosen after the "
                           "program is traced; open the block around the call of the compiled function, whose saved "
                           "tensors go through it")


ANSWERS: Mapping[Any, Callable[..., Any]] = {
    torch.is_grad_enabled: interpreter_needs_wrap(_is_grad_enabled),
    torch._C._set_grad_enabled: interpreter_needs_wrap(_set_grad_enabled),
    torch.is_inference_mode_enabled: interpreter_needs_wrap(lambda: modes().inference),
    torch.inference_mode.__enter__: _enter_inference_mode,
    torch.inference_mode.__exit__: interpreter_needs_wrap(_leave_inference_mode),
    saved_tensors_hooks.__enter__: interpreter_needs_wrap(_refuse_hooks),
}
"""What thunder's interpreter calls instead of a function."""


def _within_function(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap thunder's rule for `autograd.Function.apply`, which traces forward and backward."""

    @functools.wraps(apply)
    def call(*args: Any, **kwargs: Any) -> Any:
        trace: Any = get_tracectx()
        functions = modes().functions
        functions.append(Function(len(trace.scopes)))
        try:
            return apply(*args, **kwargs)
        finally:
            functions.pop()

    return call


WITHIN_FUNCTION = Patch("thunder.core.jit_ext", "_general_jit_lookaside_map", _within_function, item=rule_key)
