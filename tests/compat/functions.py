"""Custom autograd functions and a check of compiled programs against eager."""
from __future__ import annotations

import torch


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, cotangent):
        a, b = ctx.saved_tensors
        return cotangent * b, cotangent * a


class ScaledProductAndSum(torch.autograd.Function):
    """Two outputs, and an argument that is not a tensor."""

    @staticmethod
    def forward(ctx, a, scale, b):
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return scale * a * b, a + b

    @staticmethod
    def backward(ctx, product, total):
        a, b = ctx.saved_tensors
        return ctx.scale * product * b + total, None, ctx.scale * product * a + total


class FirstSlotOnly(torch.autograd.Function):
    """The gradient of its second argument is three times that of its first."""

    @staticmethod
    def forward(ctx, a, b):
        return a + 3 * b

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent, 3 * cotangent


def assert_like_eager(compiled, eager, *shapes):
    """Compare results and gradients of two callables on random inputs of the given shapes."""
    inputs = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    results = []
    for fn in (compiled, eager):
        out = fn(*inputs)
        grads = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
        results.append((out, *grads))
    torch.testing.assert_close(*results)
