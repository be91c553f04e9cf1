"""repeated_argument: thunder 0.2.6 writes `def F(x, x)` for `autograd.Function.apply(x, x)`, on any torch.

Each later use of a tensor is replaced by a shallow copy of it, whose gradient adds to that of the first.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jointtrace.compat.function_apply import rule_key
from jointtrace.compat.patching import Patch

TORCH = ">=2.10"


def _copy_repeated(rule: Callable[..., Any]) -> Callable[..., Any]:
    from thunder.core import prims
    from thunder.core.interpreter import unwrap, wrap
    from thunder.core.proxies import TensorProxy

    @functools.wraps(rule)
    def apply(function_class: Any, *args: Any, **kwargs: Any) -> Any:
        seen: set[str] = set()
        distinct = []
        for arg in args:
            value = unwrap(arg)
            if isinstance(value, TensorProxy):
                if value.name in seen:
                    arg = wrap(prims.shallow_copy(value), provenance=arg.provenance)
                seen.add(value.name)
            distinct.append(arg)
        return rule(function_class, *distinct, **kwargs)

    return apply


PATCHES = (Patch("thunder.core.jit_ext", "_general_jit_lookaside_map", _copy_repeated, item=rule_key),)
