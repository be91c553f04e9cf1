"""What a program returns: views, arguments, constants, what has no gradient, one tensor several times."""
from __future__ import annotations

import pytest
import torch
from numerics.oracle import leaf


def first(outputs):
    return outputs[0].square().sum()


@pytest.mark.also_fused
def test_a_result_and_views_of_it(like_eager):
    def program(x):
        y = torch.sin(x)
        return y, y.view(-1), y[1:], y.t()

    like_eager(program, leaf(3, 4))


def test_views_of_a_value_that_is_not_returned_itself(like_eager):
    def program(x):
        y = torch.sin(x)
        return y[:2], y[2:], y[1]

    like_eager(program, leaf(4, 3))


def test_one_of_several_views_gets_a_cotangent(like_eager):
    def program(x, w):
        y = torch.sin(x)
        return y, y.t(), (y * w)[0]

    like_eager(program, leaf(3, 4), leaf(3, 4), loss=lambda outputs: outputs[1].exp().sum())


def test_an_argument_is_a_result(like_eager):
    like_eager(lambda x, i: (x, torch.sin(x), i, x), leaf(3), torch.arange(3))


def test_a_result_is_a_view_of_an_argument(like_eager):
    like_eager(lambda x, w: (x.view(-1), x[1:], x.t(), w[0], x * w), leaf(3, 4), torch.randn(3, 4))


def test_a_result_is_a_view_of_an_argument_that_is_no_leaf(same_story):
    def story(fn, x):
        y = x * 2
        view, product = fn(y)
        (view.sum() + product.cos().sum()).backward()
        return view, product

    same_story(story, lambda y: (y[1:], y * y), leaf(3, 4))


@pytest.mark.also_fused
def test_detached_results_require_no_gradient(like_eager):
    def program(x):
        y = torch.sin(x)
        return y, y.detach(), x.detach(), y.detach() * 2

    like_eager(program, leaf(3))


def test_results_of_no_grad_require_no_gradient(like_eager):
    def program(x, w):
        with torch.no_grad():
            norm = x.norm()
            scaled = w * norm
        return x / norm, norm, scaled, w * scaled

    like_eager(program, leaf(4), leaf(4))


def test_gradients_switched_on_within_no_grad(like_eager):
    def program(x):
        with torch.no_grad():
            a = x * 2
            with torch.enable_grad():
                b = x * a
        return a, b

    like_eager(program, leaf(4))


def test_integer_and_boolean_results_require_no_gradient(like_eager):
    like_eager(lambda x: (x.argmax(-1), x > 0, (x * 3).long(), x.sin()), leaf(3, 4))


def test_values_and_positions_of_the_largest(like_eager):
    like_eager(lambda x: (*torch.topk(x, 2), *x.max(-1), *x.sort(-1)), leaf(3, 4))


def test_a_result_of_a_pair_is_not_used(like_eager):
    def program(x):
        values, _ = torch.topk(x, 2)
        left, _, right = x.split([1, 2, 1], -1)
        variance, _ = torch.var_mean(x, -1)
        return values.sum() + (left * right).sum(), variance

    like_eager(program, leaf(3, 4))


def test_one_tensor_in_several_places_of_a_container(like_eager):
    def program(x):
        y = torch.exp(x)
        return {"first": y, "more": [y, (y, x)], "last": y}

    like_eager(program, leaf(3))


def test_equal_results_stay_two_tensors(same_story):
    def story(fn, x):
        a, b = fn(x)
        with torch.no_grad():
            a.mul_(0)
        b.sum().backward()
        return a, b

    same_story(story, lambda x: (x * 2, x * 2), leaf(3))


def test_none_and_constants_among_results(like_eager):
    like_eager(lambda x: (None, x.sin(), 3, {"a": None, "b": (1.5, "text", True)}, [x.cos(), None]), leaf(3))


def test_sizes_among_results(like_eager):
    like_eager(lambda x: (x.shape[0], x.numel() * 2, x.sin(), tuple(x.shape)), leaf(3, 2))


def test_an_expanded_result(like_eager):
    like_eager(lambda x: (x.sin().expand(4, 3), x.unsqueeze(0).expand(2, 3)), leaf(3))


def test_results_that_are_not_contiguous(like_eager):
    def program(x):
        y = torch.sin(x)
        return y.t(), y[:, ::2], y.permute(1, 0) * 2

    like_eager(program, leaf(4, 6))


def test_empty_and_scalar_results(like_eager):
    like_eager(lambda x: (x[:0] * 2, x.sum(), x[3:].sum(), x[0]), leaf(3))


def test_what_changes_nothing_returns_its_argument(like_eager):
    def program(x):
        return x.contiguous(), x.to(torch.float32), x.float(), x.sin()

    like_eager(program, leaf(3))


def test_a_conversion_that_copies_returns_a_new_tensor(like_eager):
    like_eager(lambda x: (x.clone(), x.to(torch.float32, copy=True), x.double(), x + 0), leaf(3))


def test_parameters_and_buffers_are_results(like_eager):
    class Exposing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 4))
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            return x @ self.weight, self.weight, self.weight.t(), self.scale

    like_eager(Exposing(), leaf(2, 3))


def test_nobody_differentiates_anything(same_story):
    same_story(lambda fn, x: fn(x), lambda x: (x.sin(), x.cos()), leaf(3))


def test_the_caller_writes_to_a_result(same_story):
    def story(fn, x):
        out = fn(x)
        out.mul_(3)
        out[0] = 1
        out.cos().sum().backward()
        return out

    same_story(story, lambda x: x * x + 1, leaf(3))


def test_the_caller_writes_to_a_result_that_was_returned_twice(same_story):
    def story(fn, x):
        a, b = fn(x)
        with torch.no_grad():
            a.mul_(3)
        b.sum().backward()
        return a, b

    def program(x):
        y = x * 2
        return y, y

    same_story(story, program, leaf(3))


@pytest.mark.parametrize("used", range(3))
def test_an_argument_whose_results_get_no_cotangent_gets_none(like_eager, used):
    like_eager(lambda x, w, v: (x.sin() * w, w.cos(), v * 2), leaf(3), leaf(3), leaf(3),
               loss=lambda outputs: outputs[used].sum())


@pytest.mark.parametrize("used", range(4))
def test_an_argument_that_was_overwritten_gets_zeros_where_its_result_has_a_cotangent(like_eager, used):
    def program(x, w, v):
        y = x.sin()
        y.copy_(torch.ones_like(w))
        z = x.cos()
        z.copy_(w)
        return y, z, v * 2, torch.floor(v)

    like_eager(program, leaf(3), leaf(3), leaf(3), loss=lambda outputs: outputs[used].sum())


def test_a_result_without_a_cotangent_is_made_of_others_with_one(like_eager):
    def program(x, w):
        hidden = x * w
        return hidden, hidden.exp(), w.detach() * hidden

    like_eager(program, leaf(3), leaf(3), loss=first)
