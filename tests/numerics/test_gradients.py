"""Small programs on which a joint forward-backward compiler goes wrong easily, against eager PyTorch."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numerics.oracle import assert_like_eager, jit, leaf
from torch.utils.checkpoint import checkpoint

both_executors = pytest.mark.parametrize("executor", ["eager", "torch_compile"])


def compiled_with(executor):
    return lambda fn: jit(fn, executor)


@both_executors
def test_the_same_sine_twice_keeps_two_cotangents(executor):
    assert_like_eager(lambda x: (torch.sin(x), torch.sin(x)), leaf(2, 3), compile_fn=compiled_with(executor))


@both_executors
def test_one_tensor_returned_twice_gets_both_cotangents(executor):
    def twice(x):
        y = torch.sin(x)
        return y, y

    assert_like_eager(twice, leaf(2, 3), compile_fn=compiled_with(executor))


def test_outputs_that_need_no_gradient_require_none():
    assert_like_eager(lambda x, y: (torch.sin(x), torch.cos(y), torch.sin(x).detach()), leaf(3), torch.randn(3))


def test_no_gradient_flows_through_a_no_grad_region():
    def scaled(x):
        with torch.no_grad():
            total = (x * x).sum()
        return torch.sin(x) * total, total

    assert_like_eager(scaled, leaf(4))


def test_an_argument_of_an_output_nobody_differentiates_gets_no_gradient():
    assert_like_eager(lambda x, w: (torch.sin(x), torch.cos(w)), leaf(4), leaf(4), loss=lambda out: out[0].sum())


def test_a_custom_function_applied_to_one_tensor_twice_adds_both_gradients():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            return g * b, g * a

    assert_like_eager(lambda x: Product.apply(x, x), leaf(3))


def test_a_write_through_a_view_reaches_the_gradient_of_the_viewed_tensor():
    def doubled(x):
        y = torch.sin(x)
        y.view(-1).mul_(2)
        return 3 * y

    assert_like_eager(doubled, leaf(4, 4))


def test_an_argument_without_gradient_is_written_in_place():
    def counted(x, counter):
        counter.add_(1)
        return x * counter

    assert_like_eager(counted, leaf(4), torch.randn(4), calls=2)


def test_checkpointed_dropout_keeps_its_mask_for_the_backward():
    x = leaf(32, 32)
    out = jit(lambda a: checkpoint(lambda b: F.dropout(b, 0.5) * b, a, use_reentrant=False))(x)
    out.sum().backward()
    mask = (out / (x * x)).detach()  # 0 or 2
    torch.testing.assert_close(x.grad, 2 * mask * x.detach())
    assert 0.3 < (mask != 0).float().mean() < 0.7


@both_executors
def test_two_dropouts_of_one_shape_draw_two_masks(executor):
    first, second = jit(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)), executor)(leaf(64, 64))
    assert not torch.equal(first == 0, second == 0)


def test_tied_embedding_and_head_add_their_gradients():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(11, 6)
            self.head = torch.nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    assert_like_eager(Tied(), torch.arange(5))


@both_executors
def test_batch_norm_updates_its_buffers_at_every_call(executor):
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.ReLU())
    assert_like_eager(model, leaf(8, 5), calls=3, compile_fn=compiled_with(executor))


def test_integer_arguments_index_and_scale():
    assert_like_eager(lambda x, i: x[i] * i.unsqueeze(1), leaf(6, 4), torch.tensor([0, 2, 2, 5]))


@both_executors
def test_rotary_embedding_with_cat(executor):
    def rotate(q, cos, sin):
        half = q.shape[-1] // 2
        return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin

    assert_like_eager(
        rotate, leaf(2, 3, 5, 8), torch.randn(5, 8), torch.randn(5, 8), compile_fn=compiled_with(executor))


def test_a_call_that_needs_no_gradient_gives_outputs_without_one():
    assert_like_eager(lambda x: torch.sin(x) + 1, torch.randn(3))


@both_executors
def test_causal_attention(executor):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    qkv = (leaf(2, 4, 9, 8) for _ in range(3))
    assert_like_eager(attend, *qkv, compile_fn=compiled_with(executor))


@both_executors
def test_cross_entropy_ignores_the_targets_it_is_told_to(executor):
    def loss(x, w, y):
        return F.cross_entropy(x @ w, y, ignore_index=-100)

    targets = torch.tensor([1, -100, 3, 8, -100, 0])
    assert_like_eager(loss, leaf(6, 5), leaf(5, 9), targets, compile_fn=compiled_with(executor))


@pytest.mark.parametrize("name", ["add", "mul", "sub", "div", "maximum"])
def test_a_scalar_tensor_gets_the_sum_of_what_it_is_spread_over(name):
    operation = getattr(torch, name)
    # thunder 0.2.6 takes a scalar CPU tensor for a number, and its gradient is not summed
    assert_like_eager(lambda x, s: operation(x, x.exp().sum()) + operation(s.exp(), x), leaf(4, 2), leaf())
