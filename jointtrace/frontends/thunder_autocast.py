"""torch.autocast where thunder 0.2.6 goes another way.

Products for which thunder has no rule run in float32 there, and some say that they return bfloat16. And what was
compiled under autocast once is, for other arguments, compiled so ever after.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.symbol import Symbol
from thunder.transforms.autocast import maybe_downcast_to

from jointtrace.compat.patching import Patch
from jointtrace.frontends.thunder_python import OPTION

PRODUCTS = frozenset({  # of torch's list for CPU; `spmm` is what thunder calls `mm`
    "addbmm", "addmm", "baddbmm", "bmm", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "mm", "spmm",
})


def _rule(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def autocast_rule(symbol: Symbol) -> Callable[..., Any] | None:
        data = get_compile_data()
        if data is None or OPTION not in data.compile_options or symbol.name not in PRODUCTS:
            return original(symbol)

        def in_low_precision(*args: Any, dtype: Any, **kwargs: Any) -> Any:
            lowered: Any = maybe_downcast_to(dtype, (args, kwargs))
            return symbol(*lowered[0], **lowered[1])

        return in_low_precision

    return autocast_rule


def _general_jit(original: Callable[..., Any]) -> Callable[..., Any]:
    """thunder notes at each call the autocast around it, and forgets none of these notes."""

    @functools.wraps(original)
    def thunder_general_jit(*args: Any, **kwargs: Any) -> Any:
        data = get_compile_data()
        if data is not None and OPTION in data.compile_options:
            notes = data.autocast_stack.stack
            around = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
            newest = [notes[-1]] if around else []
            notes.clear()
            notes.extend(newest)
        return original(*args, **kwargs)

    return thunder_general_jit


PATCHES = (
    Patch("thunder", "thunder_general_jit", _general_jit),
    Patch("thunder.transforms.autocast", "_maybe_get_autocast_rule_for_symbol", _rule),
)
