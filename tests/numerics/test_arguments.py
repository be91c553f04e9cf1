"""What a program is given: one tensor in several places, containers, keywords, all kinds of strides and sizes."""
from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from numerics.oracle import leaf


def test_one_tensor_in_two_places(like_eager):
    x = leaf(3)
    like_eager(lambda a, b: a * b.sin(), x, x)


def test_one_tensor_in_a_list_a_dict_and_a_keyword(like_eager):
    def program(items, *, named, scale):
        return items[0] * named["w"].sin() + items[1] * scale

    x = leaf(3)
    like_eager(program, [x, leaf(3)], named={"w": x}, scale=x)


def test_one_tensor_in_two_places_after_two_tensors(compile_fn, like_eager):
    def program(a, b):
        return a * b.sin()

    compiled, x = compile_fn(program), leaf(3)
    like_eager(program, leaf(3), leaf(3), compiled=compiled)
    like_eager(program, x, x, compiled=compiled)
    like_eager(program, leaf(3), leaf(3), compiled=compiled)


def test_a_parameter_is_an_argument_too(same_story):
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3))

        def forward(self, x, other):
            return x * self.weight * other.cos()

    def with_weight(fn, x):
        weight = next(iter(fn.parameters()))
        out = fn(x, weight)
        out.sum().backward()
        return out

    same_story(with_weight, Scale(), leaf(3))


def test_views_of_one_base(like_eager):
    base = torch.randn(6)
    like_eager(lambda a, b, c: (a * b).sin() + c.sum(), base[:3], base[3:], base)


def test_views_of_one_leaf(same_story):
    def story(fn, x):
        out = fn(x[:2], x[1:], x)
        out.sum().backward()
        return out

    same_story(story, lambda a, b, c: a * b.sin() + c.sum(), leaf(3))


def test_arguments_that_are_no_leaves(same_story):
    def story(fn, x):
        out = fn(x * 2, x.exp())
        out.cos().sum().backward()
        return out

    same_story(story, lambda a, b: a * b, leaf(3))


@pytest.mark.also_fused
@pytest.mark.parametrize("make", [
    lambda: torch.randn(4, 3).t(), lambda: torch.randn(6, 8)[::2, 1::2],
    lambda: torch.randn(2, 3, 4).transpose(0, 2)[0],
], ids=["transposed", "strided", "part of a permutation"])
def test_a_leaf_that_is_not_contiguous(like_eager, make):
    like_eager(lambda x: (x * torch.arange(x.numel()).view(x.shape)).exp().sum(0) + x.reshape(-1)[0],
               make().mul_(0.1).requires_grad_())


def test_an_expanded_argument(same_story):
    def story(fn, x):
        out = fn(x.expand(4, 3))
        out.sum().backward()
        return out

    same_story(story, lambda x: x * torch.arange(12.0).view(4, 3), leaf(3))


def test_channels_last(like_eager):
    conv = torch.nn.Conv2d(3, 4, 3)
    image = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    like_eager(conv, image)


def test_scalar_tensors(like_eager):
    like_eager(lambda x, s, t: (x * s + t).sin() * s / t.exp(), leaf(3), leaf(), torch.tensor(2.0))


def test_scalars_alone(like_eager):
    like_eager(lambda a, b: (a * b.sin(), torch.stack((a, b)), torch.maximum(a, b)), leaf(), leaf())


def test_empty_tensors(like_eager):
    def program(x, w):
        return (x @ w).sum() + x.sum(), torch.cat((x, x.new_ones(2, 3))).sin(), x * 2

    like_eager(program, leaf(0, 3), leaf(3, 2))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_of_no_rows_has_a_gradient(like_eager, reduction):
    target = torch.zeros(0, dtype=torch.int64)
    like_eager(lambda x: F.cross_entropy(x, target, reduction=reduction), leaf(0, 4))
    like_eager(lambda x: F.nll_loss(x, target, reduction=reduction), leaf(0, 4))


def test_normalised_groups_of_no_rows_have_a_gradient(like_eager):
    like_eager(lambda x, w, b: F.group_norm(x, 2, w, b), leaf(0, 4), leaf(4), leaf(4))


def test_a_tensor_repeated_no_times_has_a_gradient(like_eager):
    like_eager(lambda x: x.repeat(0, 2), leaf(3, 4))


def test_integers_index_and_are_multiplied(like_eager):
    like_eager(lambda x, i, n: x[i] * n.unsqueeze(-1) + i.sum(), leaf(5, 2), torch.tensor([0, 4, 4]), torch.arange(3))


def test_a_mask_chooses(like_eager):
    def program(x, mask):
        return torch.where(mask, x.sin(), x * 2), x.masked_fill(mask, 0.5), (x * mask).sum()

    like_eager(program, leaf(4), torch.tensor([True, False, True, False]))


def test_the_untaken_branch_of_where_gives_no_nan(like_eager):
    def program(x):
        safe = torch.where(x > 0, x, torch.ones_like(x))
        return torch.where(x > 0, safe.sqrt(), torch.zeros_like(x))

    like_eager(program, leaf(6))


def test_an_argument_that_is_not_used_gets_no_gradient(like_eager):
    like_eager(lambda x, unused: x.sin(), leaf(3), leaf(3))


def test_an_argument_used_without_gradient_gets_none(like_eager):
    def program(x, w, v):
        with torch.no_grad():
            scale = w.sum()
        return x * scale * v.detach()

    like_eager(program, leaf(3), leaf(3), leaf(3))


def test_keyword_and_default_arguments(like_eager):
    def program(x, scale=2.0, *, shift=None, mode="sin"):
        y = getattr(torch, mode)(x) * scale
        return y if shift is None else y + shift

    like_eager(program, leaf(3), shift=leaf(3), mode="cos")
    like_eager(program, leaf(3), 3.0)


def test_any_number_of_arguments(like_eager):
    def program(*tensors, **named):
        return sum(t.sin() for t in [*tensors]) * named["scale"]

    like_eager(program, leaf(3), leaf(3), scale=leaf(3))


def test_none_among_the_arguments(like_eager):
    def program(x, bias, state):
        y = x if bias is None else x + bias
        return y.sin() if state is None else y.sin() + state

    like_eager(program, leaf(3), None, leaf(3))


def test_nested_arguments(like_eager):
    like_eager(lambda tree: tree["a"][0] * tree["b"]["c"][1].sin() + tree["a"][1],
               {"a": [leaf(3), 2.0], "b": {"c": (leaf(3), leaf(3))}})


@dataclass
class Batch:
    """Arguments of a model in one object."""

    values: torch.Tensor
    scale: float


def test_a_python_number_changes_from_call_to_call(compile_fn, like_eager):
    def program(x, n):
        return x * n + n ** 2

    compiled = compile_fn(program)
    for n in (1, 2, 5, 0.5, True):
        like_eager(program, leaf(3), n, compiled=compiled)


def test_tensors_of_a_closure(same_story):
    weight = torch.randn(3)

    def story(fn, x):
        out = fn(x)
        out.sum().backward()
        return out

    same_story(story, lambda x: x * weight, leaf(3))


def test_attention_with_a_mask_of_each_kind(like_eager):
    def program(q, k, v, allowed, bias):
        masked = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return masked, F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    like_eager(program, leaf(1, 2, 5, 4), leaf(1, 2, 5, 4), leaf(1, 2, 5, 4), allowed, torch.randn(5, 5))
