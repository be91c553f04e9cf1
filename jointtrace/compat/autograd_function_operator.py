"""autograd_function_operator: since torch 2.11 `autograd_function_apply` of a Dynamo graph has another contract.

Before:  fwd(None, *args) -> output, saved; bwd(None, *cotangents, *saved); a keyword `args_tensor_mask`.
Since:   fwd(*args) -> outputs, saved, where one output is a tuple too; bwd(*cotangents, *saved); no mask.
thunder 0.2.6 knows the first: its rule is given the second in the dress of the first.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jointtrace.compat.patching import Patch

TORCH = ">=2.11"


def _operator() -> Any:
    import torch

    return torch.ops.higher_order.autograd_function_apply


def _accept_new_contract(rule: Callable[..., Any]) -> Callable[..., Any]:
    from thunder.core.interpreter import INTERPRETER_SIGNALS, _interpret_call, wrap, wrap_const

    def dressed(fn: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
        return wrap(make(fn.value), provenance=fn.provenance)

    @functools.wraps(rule)
    def autograd_function_apply(fwd: Any, bwd: Any, *args: Any, **_: Any) -> Any:
        one = _returns_one(fwd.value)
        forward = dressed(fwd, _one_output if one else _with_context)
        mask = wrap_const([True] * len(args))
        out = rule(forward, dressed(bwd, _with_context), *args, args_tensor_mask=mask)
        if not one or out is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return out
        return _interpret_call(lambda only: (only,), out)

    return autograd_function_apply


def _returns_one(fwd: Any) -> bool:
    outputs, _ = fwd.graph.output_node().args[0]
    return isinstance(outputs, (tuple, list)) and len(outputs) == 1


def _with_context(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args: fn(*args)


def _one_output(fwd: Callable[..., Any]) -> Callable[..., Any]:
    def forward(_: None, *args: Any) -> Any:
        (output,), saved = fwd(*args)
        return output, saved

    return forward


PATCHES = (Patch("thunder.core.jit_ext", "_general_jit_lookaside_map", _accept_new_contract, item=_operator),)
