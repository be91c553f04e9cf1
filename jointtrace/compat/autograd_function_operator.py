"""autograd_function_operator: since torch 2.11 `autograd_function_apply` of a Dynamo graph has other arguments.

Before:  fwd(None, *args), bwd(None, *cotangents, *saved), a keyword `args_tensor_mask`.
Since:   fwd(*args), bwd(*cotangents, *saved), no mask: every argument is passed on.
thunder 0.2.6 knows the first form; its rule is given the second in the dress of the first.
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


def _accept_new_arguments(rule: Callable[..., Any]) -> Callable[..., Any]:
    from thunder.core.interpreter import wrap, wrap_const

    def with_context(fn: Any) -> Any:
        call = fn.value
        return wrap(lambda _, *args: call(*args), provenance=fn.provenance)

    @functools.wraps(rule)
    def autograd_function_apply(fwd: Any, bwd: Any, *args: Any, **kwargs: Any) -> Any:
        if "args_tensor_mask" in kwargs:
            return rule(fwd, bwd, *args, **kwargs)
        mask = wrap_const([True] * len(args))
        return rule(with_context(fwd), with_context(bwd), *args, args_tensor_mask=mask)

    return autograd_function_apply


PATCHES = (Patch("thunder.core.jit_ext", "_general_jit_lookaside_map", _accept_new_arguments, item=_operator),)
