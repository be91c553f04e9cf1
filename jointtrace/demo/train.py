"""Train one variant of the model and keep what it did."""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jointtrace.demo.variants import Loss

PEAK_RATE = 1e-3
WARM_UP_STEPS = 10
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Trained:
    """One variant after training: the compiled model, its parameters, every loss, and the first step's seconds."""

    name: str
    model: Loss
    parameters: tuple[nn.Parameter, ...]
    losses: tuple[float, ...]
    first_call_s: float

    def worst_difference(self, reference: Sequence[float]) -> float:
        """Return the largest relative difference of the losses from those of `reference`; infinite for a NaN."""
        pairs = zip(self.losses, reference, strict=True)
        differences = [abs(mine - theirs) / abs(theirs) for mine, theirs in pairs]
        return math.inf if any(map(math.isnan, differences)) else max(differences)


def train(
    name: str,
    build: Callable[[], nn.Module],
    compiler: Callable[[nn.Module], Loss],
    data: Iterable[Batch],
    progress: Callable[[str, float], None],
) -> Trained:
    """Build the model, compile it, and take one AdamW step per batch; call `progress(name, loss)` after each.

    `build` returns the same initial weights every time. The first call's seconds cover forward and backward: a
    backward that is compiled only when it first runs belongs to them.
    """
    module = build()
    model = compiler(module)
    parameters = tuple(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    losses: list[float] = []
    first_call_s = 0.0
    for batch in data:
        optimizer.zero_grad()
        start = time.perf_counter()
        loss = model(*batch)
        loss.backward()
        if not losses:
            first_call_s = time.perf_counter() - start
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        progress(name, losses[-1])
    return Trained(name, model, parameters, tuple(losses), first_call_s)
