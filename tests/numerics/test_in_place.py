"""Writes in place: to values, through views, to arguments, as a whole and in part."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numerics.oracle import leaf


@pytest.mark.also_fused
def test_slices_are_assigned(like_eager):
    def program(x, w):
        y = torch.zeros(4, 4)
        y[0] = x
        y[1:3, 1:] = w
        y[:, 0] += x.sin()
        y[..., -1] *= 2
        return y.cos()

    like_eager(program, leaf(4), leaf(2, 3))


def test_elements_are_assigned_by_index(like_eager):
    def program(x, w, i):
        y = x * 1
        y[i] = w
        z = x.sin()
        z[1:, 0] = w[:1, 1]
        return y.sin(), z

    like_eager(program, leaf(4, 2), leaf(2, 2), torch.tensor([0, 3]))


def test_a_chain_of_activations_in_place(like_eager):
    like_eager(lambda x: (x * 2).sin_().mul_(0.3).cos_().add_(x).tanh_(), leaf(4))


def test_a_write_through_a_view_of_a_view(like_eager):
    def program(x, w):
        y = x.sin()
        y.view(2, 2, 3)[1].t()[0].mul_(w)
        return y * y

    like_eager(program, leaf(4, 3), leaf(2))


def test_a_view_and_its_base_are_both_returned_after_writes_to_both(like_eager):
    def program(x):
        y = x * 2
        view = y[1:]
        y.add_(1)
        view.mul_(3)
        return y, view, y * view.sum()

    like_eager(program, leaf(4))


@pytest.mark.also_fused
def test_a_whole_value_is_overwritten_by_a_constant(like_eager):
    def program(x, w):
        y = x.sin()
        y[:] = 2.0
        return y, w * 3

    like_eager(program, leaf(3), leaf(3), loss=lambda outputs: outputs[0].sum())


def test_a_part_is_zeroed(like_eager):
    def program(x):
        y = x.sin()
        y[1:].zero_()
        y.view(-1)[0] = 3
        return y * x

    like_eager(program, leaf(3, 2))


def test_a_write_broadcasts(like_eager):
    def program(x, w):
        y = x.sin()
        y.add_(w)
        y[0].mul_(w.sum())
        return y

    like_eager(program, leaf(3, 4), leaf(4))


def test_scatter_and_its_kin_in_place(like_eager):
    def program(x, source, index):
        y = x.sin()
        y.scatter_add_(1, index, source)
        z = x.cos()
        z.masked_fill_(x > 0, 0.1)
        return y * y, z

    like_eager(program, leaf(3, 4), leaf(3, 2), torch.randint(0, 4, (3, 2)))


def test_a_value_is_copied_to_another_dtype(like_eager):
    def program(x):
        y = torch.zeros(3, dtype=torch.float64)
        y.copy_(x)
        z = y * 2
        z[1:] = x[1:]
        return z

    like_eager(program, leaf(3))


def test_two_values_are_swapped(like_eager):
    def program(x, w):
        a, b = x * 1, w * 1
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
        return a.sin(), b.cos()

    like_eager(program, leaf(3), leaf(3))


def test_a_value_is_written_in_a_loop(like_eager):
    def program(x):
        rows = torch.empty(4, 3)
        state = x
        for i in range(4):
            state = state.sin() * (i + 1)
            rows[i] = state
        return rows.cumsum(0)

    like_eager(program, leaf(3))


def test_an_argument_counts_calls(like_eager):
    def program(x, count):
        count += 1
        return x * count

    like_eager(program, leaf(3), torch.zeros(3), calls=3)


def test_an_argument_without_a_gradient_is_written_through_views(like_eager):
    def program(x, cache, position):
        cache[:, 1:3].copy_(x.detach())
        cache.t()[0].add_(position)
        return (cache[:, :2] * x).sum()

    like_eager(program, leaf(3, 2), torch.zeros(3, 4), torch.arange(3), calls=2)


def test_an_integer_argument_is_written(like_eager):
    def program(x, count):
        count[1] += 1
        count *= 2
        return x * count

    like_eager(program, leaf(3), torch.arange(3), calls=2)


def test_a_written_argument_and_a_view_of_it_are_returned(like_eager):
    def program(x, state):
        state.mul_(2)
        return state, state[1:], x * state

    like_eager(program, leaf(3), torch.randn(3))


def test_an_argument_that_is_no_leaf_is_written(same_story):
    def story(fn, x, w):
        y = x * 2
        out = fn(y, w)
        (out.sum() + y.cos().sum()).backward()
        return out, y

    def program(y, w):
        y.mul_(w)
        return y.sin()

    same_story(story, program, leaf(3), leaf(3))


def test_an_argument_without_a_gradient_gets_one(same_story):
    def story(fn, x, state):
        out = fn(x, state)
        (state.sum() * 2 + out.sum()).backward()
        return out, state

    def program(x, state):
        state.add_(x)
        return x * 3

    same_story(story, program, leaf(3), torch.zeros(3))


def test_the_diagonal_is_written(like_eager):
    def program(x):
        y = x.sin()
        y.diagonal().mul_(3)
        return y * y

    like_eager(program, leaf(3, 3))


def test_an_activation_in_place_within_layers(like_eager):
    layers = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 4), torch.nn.SiLU(inplace=True))
    like_eager(layers, leaf(5, 3))


def test_an_activation_in_place_beside_a_dropout(like_eager):
    like_eager(lambda x: F.dropout(x * 2, 0.5, training=False) + F.relu(x + 1, inplace=True), leaf(4))


def test_a_write_under_no_grad_is_no_part_of_the_gradient(like_eager):
    def program(x):
        y = x.sin()
        with torch.no_grad():
            y[0] = 5
            y.clamp_(max=0.5)
        return y * x, y

    like_eager(program, leaf(4))


def test_a_write_to_a_leaf_is_an_error_as_in_eager(compile_fn):
    def program(x):
        x.mul_(2)
        return x.sin()

    x = leaf(3)
    before = x.detach().clone()
    with pytest.raises((RuntimeError, NotImplementedError), match="leaf"):
        compile_fn(program)(x)
    assert torch.equal(x.detach(), before)
