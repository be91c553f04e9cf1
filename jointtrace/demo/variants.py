"""The ways of running one model that the demo and the benchmarks compare."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder
import torch
from torch import Tensor, nn

from jointtrace.executors.torch_compile import TorchCompileExecutor

Loss = Callable[..., Tensor]
"""A model in any form: called with its inputs, returns the scalar loss."""

EAGER = "eager"
TORCH_COMPILE = "torch.compile"
THUNDER = "thunder"
JOINTTRACE = "jointtrace"
OURS_BY_THUNDER = f"{JOINTTRACE} (thunder)"
OURS_BY_TORCH_COMPILE = f"{JOINTTRACE} (torch.compile)"


def torch_compile(model: nn.Module) -> Loss:
    """Compile `model` by PyTorch's own compiler, as one graph."""
    return torch.compile(model, fullgraph=True, dynamic=False)


def plain_thunder(model: nn.Module) -> Loss:
    """Compile `model` by lightning-thunder as it is."""
    return thunder.jit(model)


def by_thunder(executor: str) -> Callable[[nn.Module], Loss]:
    """Return a function that compiles a model by thunder through our joint trace, with `executor` for the regions."""

    def compile_jointly(model: nn.Module) -> Loss:
        return thunder.jit(model, delay_trace_split=True, jointtrace={"executors": (executor,)})

    return compile_jointly


def by_torch_compile(executor: str) -> Callable[[nn.Module], Loss]:
    """Return a function that compiles a model by torch.compile through our joint trace, as one graph."""

    def compile_jointly(model: nn.Module) -> Loss:
        options: Any = {"executors": (executor,)}
        return torch.compile(model, backend=JOINTTRACE, options=options, fullgraph=True, dynamic=False)

    return compile_jointly


def compiler_missing() -> str | None:
    """Return why nothing can be compiled to machine code here, or None where it can."""
    return TorchCompileExecutor().unavailable()


def is_ours(name: str) -> bool:
    """Tell whether the variant `name` is compiled by jointtrace."""
    return name.startswith(JOINTTRACE)
