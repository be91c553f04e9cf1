"""function_apply: on torch >= 2.14 `autograd.Function.apply` is a builtin, on which thunder 0.2.6 stumbles twice.

While it is imported it asks for `apply.__func__`, the key of its rule for custom autograd functions; a Python
`apply` stands there for that time. While it traces, `MyFunction.apply` is another object for every class, which no
table of rules can hold, so the rule is found by the class instead.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import BuiltinMethodType
from typing import Any

from jointtrace.compat.patching import Patch

TORCH = ">=2.14"


def _apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    from torch._C import _FunctionBase

    return vars(_FunctionBase)["apply"].__get__(None, cls)(*args, **kwargs)


@contextlib.contextmanager
def python_apply() -> Iterator[None]:
    """Let `autograd.Function.apply` be a Python class method for the time of the block."""
    from torch.autograd import Function

    builtin = vars(Function)["apply"]
    Function.apply = classmethod(_apply)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Function.apply = builtin


def rule_key() -> Any:
    """Return the key under which thunder keeps its rule for `autograd.Function.apply`, on any torch."""
    from torch.autograd import Function

    return getattr(Function.apply, "__func__", _apply)


def _find_by_class(lookup: Callable[..., Any]) -> Callable[..., Any]:
    from thunder.core.interpreter import wrap_const
    from thunder.core.jit_ext import _general_jit_lookaside_map
    from torch.autograd.function import FunctionMeta

    def general_jit_lookaside(fn: Any, *args: Any, **kwargs: Any) -> Any:
        is_builtin_of_a_function = isinstance(fn, BuiltinMethodType) and isinstance(fn.__self__, FunctionMeta)
        if not is_builtin_of_a_function or fn.__name__ != "apply":
            return lookup(fn, *args, **kwargs)
        rule = _general_jit_lookaside_map[_apply]
        return lambda *args, **kwargs: rule(wrap_const(fn.__self__), *args, **kwargs)

    return general_jit_lookaside


PATCHES = (Patch("thunder.core.jit_ext", "general_jit_lookaside", _find_by_class),)
