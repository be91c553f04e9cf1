"""Are gradients exact for the dropout masks that the forward drew? Asked of the forward itself, in float64.

The same seed draws the same masks, so differences of the compiled forward's loss give the gradient for them.
"""
from __future__ import annotations

import models  # imports jointtrace, without which thunder cannot be imported
import torch
from side_by_side import Compiler
from thunder.tests.nanogpt_model import Block, GPTConfig
from torch import Tensor, nn

WIDTH = 32
CONTEXT = 16
SEED = 7
STEP = 1e-5
TOLERANCE = 1e-6
"""Of a relative difference; rounding of the loss gives 1e-16 / 1e-5 = 1e-11 of it, another mask tenths."""


class Squared(nn.Module):
    """nanoGPT's block with dropout in three places; the loss is the mean square of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(GPTConfig(n_embd=WIDTH, n_head=2, block_size=CONTEXT, dropout=0.3))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.block(x_BTD).square().mean()


def workload() -> models.Workload:
    """Return the module and its input, whose gradient is asked for."""
    torch.manual_seed(0)
    return Squared().double(), (torch.randn(2, CONTEXT, WIDTH, dtype=torch.float64, requires_grad=True),)


def error_of(compile_: Compiler) -> float:
    """Return the relative error of the gradient along one random direction of input and parameters.

    Raises:
        AssertionError: the same seed does not give the same loss again, or other seeds give it too.
    """
    torch._dynamo.reset()
    module, (x_BTD,) = workload()
    model = compile_(module)
    tensors = [x_BTD, *module.parameters()]
    directions = [torch.randn_like(tensor) for tensor in tensors]

    def loss(seed: int = SEED) -> Tensor:
        torch.manual_seed(seed)
        return model(x_BTD)

    first = loss()
    first.backward()
    slope = sum(float((tensor.grad * way).sum()) for tensor, way in zip(tensors, directions, strict=True)
                if tensor.grad is not None)
    assert loss().item() == first.item() != loss(SEED + 1).item()
    sides = []
    for sign in (1, -2):  # from where the tensors stand to one side, then through to the other
        with torch.no_grad():
            for tensor, way in zip(tensors, directions, strict=True):
                tensor.add_(way, alpha=sign * STEP)
        sides.append(loss().item())
    return abs((sides[0] - sides[1]) / (2 * STEP) - slope) / abs(slope)
