"""several_results: thunder 0.2.6 gives `autograd.Function.apply` with several results no gradient, on any torch.

Its gradient rule asserts that there is one result; all else in it holds for several. The rule is replaced by one
without the assertion, made of the same parts.
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from jointtrace.compat.function_apply import rule_key
from jointtrace.compat.patching import Patch

TORCH = ">=2.10"


def _differentiate_all(rule: Callable[..., Any]) -> Callable[..., Any]:
    from thunder.core.jit_ext import get_jit_ctx

    @functools.wraps(rule)
    def apply(function_class: Any, *args: Any, **kwargs: Any) -> Any:
        implementations = get_jit_ctx().ad_hoc_executor.implmap
        known = set(implementations)
        result = rule(function_class, *args, **kwargs)
        for name in [*implementations]:
            if name not in known and implementations[name].grad_transform is not None:
                implementations[name].grad_transform = _for_several(implementations[name].grad_transform)
        return result

    return apply


def _for_several(grad_transform: Callable[..., Any]) -> Callable[..., Any]:
    from thunder.core.baseutils import sequencify
    from thunder.core.prims import get_grad
    from thunder.core.pytree import tree_map
    from thunder.core.trace_interpreter import interpret_trace
    from thunder.core.transforms import put_grads

    parts = inspect.getclosurevars(grad_transform).nonlocals
    forward, backward = parts["aliased_trace_of_augmented_fwd"], parts["bwd_impl_callable"]

    @functools.wraps(grad_transform)
    def differentiate(*args: Any) -> Any:
        results, residuals = interpret_trace(forward, *args)
        grads = tree_map(get_grad, results)
        put_grads(args, backward(*parts["ctx_proxy"].saved_consts, *sequencify(residuals), *grads))
        return results

    return differentiate


PATCHES = (Patch("thunder.core.jit_ext", "_general_jit_lookaside_map", _differentiate_all, item=rule_key),)
