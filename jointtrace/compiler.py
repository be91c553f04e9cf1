"""compiler: `jointtrace.compile`, torch.compile with this backend and its options checked where they are given."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jointtrace.executors.registry import resolve
from jointtrace.frontends.aot import options_of


def compile(
    model: Callable[..., Any] | None = None, *, dynamic: bool | None = None, fullgraph: bool = False, **options: Any
) -> Any:
    """Compile a module or function: `torch.compile(model, backend="jointtrace")`. Without `model`: a decorator.

    Args:
        model: a module or function; what comes back shares a module's parameters and buffers.
        dynamic: True makes sizes unknown from the start, False fixes them all, None learns from the first change.
        fullgraph: whether a graph break is an error.
        options: fields of `jointtrace.Options` but `late_split`, and `mode`, the effort that Inductor makes where it
            compiles regions: "default" or "max-autotune-no-cudagraphs".

    Raises:
        OptionError: an unknown option, executor, pass or mode, at once.
        UnsupportedError: an executor cannot run here.
    """
    checked, _ = options_of(options=options)
    resolve(checked.executors)
    return torch.compile(model, backend="jointtrace", options=options, dynamic=dynamic, fullgraph=fullgraph)
