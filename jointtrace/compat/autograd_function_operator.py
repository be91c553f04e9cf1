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

    def with_context(fn: Any) -> Any:
        call = fn.value
        return wrap(lambda _, *args: call(*args), provenance=fn.provenance)

    @functools.wraps(rule)
    def autograd_function_apply(fwd: Any, bwd: Any, *args: Any, **_: Any) -> Any:
        mask = wrap_const([True] * len(args))
        out = rule(with_context(fwd), with_context(bwd), *args, args_tensor_mask=mask)
        if out is INTERPRETER_SIGNALS.EXCEPTION_RAISED or not _returns_one(fwd.value):
            return out
        return _interpret_call(lambda only: (only,), out)  # the rule takes it out of its tuple

    return autograd_function_apply


def _returns_one(fwd: Any) -> bool:
    outputs, _ = fwd.graph.output_node().args[0]
    return isinstance(outputs, (tuple, list)) and len(outputs) == 1


PATCHES = (Patch("thunder.core.jit_ext", "_general_jit_lookaside_map", _accept_new_contract, item=_operator),)
