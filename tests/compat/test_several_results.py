"""Custom autograd functions with several results have gradients in thunder, ours or not."""
from __future__ import annotations

import thunder
import torch
from numerics.oracle import leaf


class SineAndCosine(torch.autograd.Function):
    """Two results that share what is saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, of_sine, of_cosine):
        (x,) = ctx.saved_tensors
        return 2 * of_sine * x.cos() - 3 * of_cosine * x.sin()


def test_thunder_differentiates_a_function_with_two_results():
    x = leaf(3)
    sine, cosine = thunder.jit(lambda x: SineAndCosine.apply(x))(x)
    (sine.sum() + cosine.sum()).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos() - 3 * x.detach().sin())
