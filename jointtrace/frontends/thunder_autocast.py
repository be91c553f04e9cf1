"""torch.autocast where thunder 0.2.6 goes another way.

Products for which thunder has no rule run in float32 there, and some say that they return bfloat16; losses of low
precision stay so. And what was compiled under autocast once is, for other arguments, compiled so ever after.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from thunder.core.compile_data import get_compile_data
from thunder.core.dtypes import float32
from thunder.core.symbol import Symbol
from thunder.transforms.autocast import maybe_downcast_to

from jointtrace.compat.patching import Patch
from jointtrace.frontends.thunder_python import OPTION

PRODUCTS = frozenset({  # of torch's list for CPU; `spmm` is what thunder calls `mm`
    "addbmm", "addmm", "baddbmm", "bmm", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "mm", "spmm",
})
IN_FLOAT32 = frozenset({  # of torch's lists for CPU and CUDA
    "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss", "kl_div", "l1_loss", "mse_loss", "nll_loss",
    "prod",
    "smooth_l1_loss",
})


def _rule(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def autocast_rule(symbol: Symbol) -> Callable[..., Any] | None:
        data = get_compile_data()
        if data is None or OPTION not in data.compile_options or symbol.name not in PRODUCTS | IN_FLOAT32:
            return original(symbol)

        def converted(*args: Any, dtype: Any, **kwargs: Any) -> Any:
            wanted = float32 if symbol.name in IN_FLOAT32 else dtype
            given: Any = maybe_downcast_to(wanted, (args, kwargs))
            return symbol(*given[0], **given[1])

        return converted

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
