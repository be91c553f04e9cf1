"""Calls and backwards in other orders than one and one: retained graphs, several losses, accumulation, no gradients."""
from __future__ import annotations

import pytest
import torch
from numerics.oracle import leaf, tensors


def sines(x, w):
    hidden = x.sin() * w
    return hidden, hidden.exp()


@pytest.mark.also_fused
def test_two_backwards_of_a_retained_graph(same_story):
    def story(fn, x, w):
        first, second = fn(x, w)
        first.sum().backward(retain_graph=True)
        (first * second).sum().backward(retain_graph=True)
        second.cos().sum().backward()
        return first, second

    same_story(story, sines, leaf(3), leaf(3))


def test_a_second_backward_without_a_retained_graph_is_an_error(compile_fn):
    x = leaf(3)
    out = compile_fn(lambda x: x.sin() * x)(x)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        out.sum().backward()


def test_each_result_has_a_loss_of_its_own(same_story):
    def story(fn, x, w):
        grads = []
        first, second = fn(x, w)
        for out in (first, second):
            grads.append(torch.autograd.grad(out.square().sum(), (x, w), retain_graph=True))
        return grads

    same_story(story, sines, leaf(3), leaf(3))


def test_gradients_by_given_cotangents(same_story):
    def story(fn, x, w):
        outs = fn(x, w)
        return torch.autograd.grad(outs, (x, w), grad_outputs=(torch.arange(3.0), torch.ones(3)))

    same_story(story, sines, leaf(3), leaf(3))


def test_gradients_of_some_arguments_alone(same_story):
    def story(fn, x, w, v):
        first, _ = fn(x, w, v)
        return torch.autograd.grad(first.sum(), (x, v), allow_unused=True)

    same_story(story, lambda x, w, v: (x * w, v.sin()), leaf(3), leaf(3), leaf(3))


@pytest.mark.also_fused
def test_gradients_are_accumulated(same_story):
    def story(fn, *batches):
        outs = []
        for x in batches:
            outs.append(fn(x))
            (outs[-1].square().mean() / len(batches)).backward()
        return outs

    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    same_story(story, layers, *(torch.randn(2, 3) for _ in range(3)))


def test_two_calls_before_their_backwards(same_story):
    def story(fn, x, w):
        a, _ = fn(x, w)
        _, b = fn(w, x)
        b.sum().backward()
        a.sum().backward()
        return a, b

    same_story(story, sines, leaf(3), leaf(3))


def test_a_call_on_results_of_another_call(same_story):
    def story(fn, x, w):
        outs = fn(*fn(*fn(x, w)))
        (outs[0] + outs[1]).sum().backward()
        return outs

    same_story(story, lambda x, w: (x.sin() * w, x + w), leaf(3), leaf(3))


def test_a_call_among_eager_operations(same_story):
    def story(fn, x, w):
        y = (x * 2).tanh()
        first, second = fn(y, w.exp())
        loss = (first @ second + y.sum()) * w.sum()
        loss.backward()
        return loss

    same_story(story, sines, leaf(3), leaf(3))


def test_calls_without_gradients_between_calls_with_them(same_story):
    def story(fn, x, w):
        outs = [*fn(x, w)]
        with torch.no_grad():
            outs += fn(x, w)
        with torch.inference_mode():
            outs += [out.sum().item() for out in fn(x, w)]
        outs += fn(x, w)
        assert [out.requires_grad for out in tensors(outs)] == [True, True, False, False, True, True]
        (outs[0] * outs[-1]).sum().backward()
        return outs

    same_story(story, sines, leaf(3), leaf(3))


def test_a_first_call_without_gradients(same_story):
    def story(fn, x):
        with torch.no_grad():
            first = fn(x)
        second = fn(x)
        second.sum().backward()
        return first, second

    same_story(story, torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)), leaf(5, 3))


def test_arguments_stop_and_start_to_require_gradients(same_story):
    def story(fn, x, w):
        outs = []
        for a, b in ((True, True), (False, True), (True, False), (True, True)):
            x.requires_grad_(a)
            w.requires_grad_(b)
            outs.append(fn(x, w)[1])
            outs[-1].sum().backward()
        return outs

    same_story(story, sines, leaf(3), leaf(3))


@pytest.mark.also_fused
def test_other_shapes_come_with_later_calls(compile_fn, like_eager):
    def program(x, w):
        return (x @ w).relu().sum(0), x.shape[0]

    compiled = compile_fn(program)
    for rows in (2, 5, 1, 2, 7):
        like_eager(program, leaf(rows, 3), leaf(3, 4), compiled=compiled)


def test_other_numbers_of_dimensions_come_with_later_calls(compile_fn, like_eager):
    def program(x):
        return x.sin().sum(-1)

    compiled = compile_fn(program)
    for shape in ((3,), (2, 3), (2, 1, 3), (0, 3)):
        like_eager(program, leaf(*shape), compiled=compiled)


def test_other_strides_come_with_later_calls(compile_fn, like_eager):
    def program(x):
        return (x * 2).sin().sum(0), x.exp()

    compiled = compile_fn(program)
    for x in (torch.randn(3, 3), torch.randn(3, 3).t(), torch.randn(6, 6)[::2, ::2], torch.randn(1, 3).expand(3, 3)):
        like_eager(program, x.clone(memory_format=torch.preserve_format).requires_grad_(), compiled=compiled)
        like_eager(program, x, compiled=compiled)


def test_a_backward_with_a_cotangent_that_is_not_contiguous(same_story):
    def story(fn, x):
        out = fn(x)
        out.backward(torch.arange(12.0).view(4, 3).t())
        return out

    same_story(story, lambda x: x.sin().exp(), leaf(3, 4))


def test_a_backward_with_an_expanded_cotangent(same_story):
    def story(fn, x, w):
        out = fn(x, w)
        out.sum().backward()
        return out

    same_story(story, lambda x, w: (x @ w).t(), leaf(3, 4), leaf(4, 2))


def test_a_second_derivative_is_an_error_and_no_silent_zero(compile_fn):
    x = leaf(3)
    (grad,) = torch.autograd.grad(compile_fn(lambda x: x.sin() * x)(x).sum(), x, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"second derivative|double backward"):
        grad.sum().backward()


def test_a_loss_is_scaled_and_gradients_are_unscaled(same_story):
    def story(fn, x):
        loss = fn(x).square().mean()
        (loss * 1024).backward()
        for p in fn.parameters():
            p.grad.div_(1024)
        torch.nn.utils.clip_grad_norm_(fn.parameters(), 0.1)
        return loss

    same_story(story, torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.randn(4, 3))


def test_arguments_made_in_inference_mode(compile_fn):
    with torch.inference_mode():
        x = torch.randn(3)
    compiled = compile_fn(lambda x: (x * 2).sin())
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), (x * 2).sin())


def test_a_backward_without_gradients_enabled(same_story):
    def story(fn, x):
        out = fn(x).sum()
        with torch.no_grad():
            out.backward()
        return out

    same_story(story, lambda x: x.sin() * x, leaf(3))
