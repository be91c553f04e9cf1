"""The floor of a step: the model's own matrix products, convolutions and attention, and nothing else."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
PRODUCTS = frozenset(flop_registry) | {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
}
"""What torch counts as floating-point work, and the CPU's attention, which it does not count (torch 2.13)."""

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class ProductRecorder(TorchDispatchMode):
    """Keeps every product that runs below autograd while it is active, with the very tensors it ran on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.overloadpacket in PRODUCTS:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def products_of(step: Callable[[], object]) -> list[Call]:
    """Run one eager `step` (forward and backward) and return its products in order.

    The calls hold their operands: replayed in turn they find each in memory rather than in cache, as the step does.
    """
    with ProductRecorder() as recorder:
        step()
    return recorder.calls


def replay_of(calls: list[Call]) -> Callable[[], None]:
    """Return a function that runs `calls` and drops every result at once."""

    @torch.no_grad()
    def replay() -> None:
        for func, args, kwargs in calls:
            func(*args, **kwargs)

    return replay
