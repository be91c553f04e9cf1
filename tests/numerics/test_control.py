"""Python around tensors: loops over time, branches, routers, comprehensions, checkpoints, custom functions."""
from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from numerics.oracle import leaf
from torch.utils.checkpoint import checkpoint


@pytest.mark.also_fused
def test_a_loop_over_time(like_eager):
    def program(x, w, h):
        outs = []
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + h @ w)
            outs.append(h)
        return torch.stack(outs), h

    like_eager(program, leaf(4, 2, 3), leaf(3, 3), leaf(2, 3))


def test_a_loop_over_rows_of_a_tensor(like_eager):
    def program(x):
        total = torch.zeros(3)
        for i, row in enumerate(x):
            total = total * 0.5 + row.sin() * i
        return total

    like_eager(program, leaf(4, 3))


def test_a_gated_recurrent_cell(like_eager):
    def program(x, w, u, h):
        for step in x.unbind(0):
            r, z, n = (step @ w).chunk(3, -1)
            hr, hz, hn = (h @ u).chunk(3, -1)
            z = torch.sigmoid(z + hz)
            h = (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * h
        return h

    like_eager(program, leaf(3, 2, 4), leaf(4, 9), leaf(3, 9), leaf(2, 3))


def test_branches_on_shapes_and_settings(compile_fn, like_eager):
    def program(x, double):
        y = x.sin() if x.shape[0] > 2 else x.cos()
        return y * 2 if double else y

    compiled = compile_fn(program)
    for size, double in ((3, True), (2, True), (3, False)):
        like_eager(program, leaf(size), double, compiled=compiled)


@pytest.mark.also_fused
def test_a_router_weighs_the_best_experts(like_eager):
    def program(x, gate, experts):
        weights, chosen = torch.topk(torch.softmax(x @ gate, -1), 2)
        weights = weights / weights.sum(-1, keepdim=True)
        outs = torch.einsum("td,edf->tef", x, experts)
        picked = torch.gather(outs, 1, chosen.unsqueeze(-1).expand(-1, -1, outs.shape[-1]))
        return (picked * weights.unsqueeze(-1)).sum(1), chosen

    like_eager(program, leaf(5, 3), leaf(3, 4), leaf(4, 3, 2))


def test_a_router_masks_each_expert(like_eager):
    def program(x, gate, experts):
        scores = torch.softmax(x @ gate, -1)
        best = scores.argmax(-1)
        out = torch.zeros_like(x)
        for e in range(experts.shape[0]):
            mask = (best == e).unsqueeze(-1)
            out = out + torch.where(mask, (x @ experts[e]) * scores[:, e:e + 1], 0.0)
        return out

    like_eager(program, leaf(5, 3), leaf(3, 2), leaf(2, 3, 3))


def test_comprehensions_and_generators(like_eager):
    def program(x, heads):
        parts = [x[:, i::heads].sin() for i in range(heads)]
        named = {str(i): part.sum(-1) for i, part in enumerate(parts)}
        return torch.cat(parts, -1), sum(v for v in named.values()), max(part.shape[-1] for part in parts)

    like_eager(program, leaf(3, 4), 2)


def test_a_generator_is_unpacked(like_eager):
    def program(x):
        q, k, v = (t.transpose(0, 1) for t in x.chunk(3, -1))
        return q * k.sin() + v

    like_eager(program, leaf(2, 6))


def test_functions_of_functions(like_eager):
    def program(x):
        def scale(y, by):
            return y * by

        def apply(f, y, n):
            return y if n == 0 else apply(f, f(y), n - 1)

        half = functools.partial(scale, by=0.5)
        return apply(lambda y: half(y.sin()), x, 3)

    like_eager(program, leaf(3))


def test_gather_and_selections(like_eager):
    def program(x, i):
        return (torch.gather(x, 1, i), torch.index_select(x, 0, i[0]), torch.take_along_dim(x, i, 1),
                x[torch.arange(3), i[:, 0]], F.embedding(i, x))

    like_eager(program, leaf(3, 4), torch.tensor([[0, 1], [2, 0], [1, 1]]))


def test_einsum_and_batched_products(like_eager):
    def program(a, b):
        return torch.einsum("bij,bjk->bik", a, b), torch.einsum("bij->bji", a), a @ b, torch.einsum("bij,bjk->", a, b)

    like_eager(program, leaf(2, 3, 4), leaf(2, 4, 2))


def test_cumulative_sums_and_norms(like_eager):
    like_eager(lambda x: (x.cumsum(0), torch.logsumexp(x, -1), x.norm(dim=-1), x.var(0), x.std(-1)), leaf(4, 3))


def test_a_checkpoint(like_eager):
    def program(x, w):
        inner = checkpoint(lambda a: (a @ w).sin().exp(), x, use_reentrant=False)
        return inner * 2

    like_eager(program, leaf(3, 4), leaf(4, 4))


def test_a_checkpoint_in_a_checkpoint(like_eager):
    def program(x):
        def inner(a):
            return a.sin() * a

        def outer(a):
            return checkpoint(inner, a.exp(), use_reentrant=False).cos()

        return checkpoint(outer, x, use_reentrant=False) * x

    like_eager(program, leaf(4))


def test_a_checkpoint_with_several_results(like_eager):
    def program(x, w):
        a, b = checkpoint(lambda a, s: (a.sin() * s, a.detach().cos()), x, w, use_reentrant=False)
        return a * b, b

    like_eager(program, leaf(4), leaf(4))


class Clipped(torch.autograd.Function):
    """Rounds, and passes gradients straight through within a range."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit).round()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= ctx.limit), None


def test_a_custom_function_that_passes_gradients_straight_through(like_eager):
    like_eager(lambda x: Clipped.apply(x * 3, 2.0) * x, leaf(6))


class TwoResults(torch.autograd.Function):
    """Has two results; its backward is not that of its forward, so that it must be the one that runs."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a + b, a * b

    @staticmethod
    def backward(ctx, g, h):
        a, b = ctx.saved_tensors
        return g * 2 + h * b, g * 3 + h * a


def test_a_custom_function_with_two_results(like_eager):
    def program(a, b):
        first, second = TwoResults.apply(a, b)
        return first * 2 + second

    like_eager(program, leaf(3), leaf(3))


def test_a_custom_function_applied_to_one_tensor_twice_with_two_results(like_eager):
    def program(x):
        first, second = TwoResults.apply(x, x)
        return first.sin(), second.cos()

    like_eager(program, leaf(3))


def test_a_gradient_stopped_straight_through(like_eager):
    like_eager(lambda x: x + (x.round() - x).detach() * 2, leaf(5))


def test_one_value_used_many_times(like_eager):
    def program(x):
        y = x.sin()
        return y * y + y.exp() * y[0] + y.sum() * y.mean(), y * x

    like_eager(program, leaf(4))


def test_a_convolution_with_pooling(like_eager):
    def program(x, w, b):
        y = F.conv2d(x, w, b, padding=1)
        return F.max_pool2d(y.relu(), 2), F.avg_pool2d(y, 2), F.adaptive_avg_pool2d(y, 1)

    like_eager(program, leaf(2, 3, 6, 6), leaf(4, 3, 3, 3), leaf(4))


@pytest.mark.also_fused
def test_attention_by_hand(like_eager):
    def program(q, k, v):
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v

    like_eager(program, leaf(1, 2, 5, 4), leaf(1, 2, 5, 4), leaf(1, 2, 5, 4))


def test_losses(like_eager):
    def program(x, y, i):
        return (F.mse_loss(x, y), F.cross_entropy(x, i, label_smoothing=0.1), F.cross_entropy(x, i, reduction="sum"),
                F.binary_cross_entropy_with_logits(x, y.sigmoid()), F.l1_loss(x, y), F.smooth_l1_loss(x, y))

    like_eager(program, leaf(3, 4), leaf(3, 4), torch.tensor([0, 3, 1]))
