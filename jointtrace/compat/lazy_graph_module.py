"""lazy_graph_module: since torch 2.12 `split_module` makes lazy graph modules inside Dynamo.

They write their code at the first call, and thunder 0.2.6 would interpret the writing. It gets plain ones instead.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jointtrace.compat.patching import Patch

TORCH = ">=2.12"


def _plain(split_module: Callable[..., Any]) -> Callable[..., Any]:
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    @functools.wraps(split_module)
    def split_into_plain_modules(*args: Any, **kwargs: Any) -> Any:
        with _use_lazy_graph_module(False):
            return split_module(*args, **kwargs)

    return split_into_plain_modules


PATCHES = (Patch("thunder.dynamo.splitter", "split_module", _plain),)
