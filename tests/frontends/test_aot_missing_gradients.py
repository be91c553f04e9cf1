"""Gradients that eager PyTorch leaves out are left out by the torch.compile front end too, not made as zeros."""
from __future__ import annotations

import functools

import pytest
import torch
import torch._dynamo as dynamo
from numerics.oracle import assert_like_eager, compile_below_aot, leaf

like_eager = functools.partial(assert_like_eager, compile_fn=compile_below_aot)
sines = compile_below_aot(lambda x, w: (torch.sin(x), torch.cos(w)))


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    dynamo.reset()


def first(outputs):
    return outputs[0].sum()


def test_where_a_result_is_not_differentiated():
    like_eager(lambda x, w: (torch.sin(x), torch.cos(w)), leaf(4), leaf(4), loss=first)


def test_where_results_are_views_of_results():
    like_eager(lambda x, w: (torch.sin(x).view(-1), torch.cos(w).view(-1)), leaf(4), leaf(4), loss=first)


def test_where_a_result_is_a_view_of_an_argument():
    like_eager(lambda x, w: (x.view(-1), torch.cos(w) * x), leaf(4), leaf(4), loss=first)


def test_where_one_of_three_is_missing():
    like_eager(lambda x, w, v: (torch.sin(x) * w, torch.cos(w), v * 2), leaf(4), leaf(4), leaf(4),
               loss=lambda outputs: outputs[0].sum() + outputs[1].sum())


def test_where_an_argument_comes_twice_and_others_need_none():
    x = leaf(4)
    like_eager(lambda a, i, b, w: (a * b * i, torch.cos(w)), x, torch.arange(4), x, leaf(4), loss=first)


def test_where_sizes_are_among_the_arguments_and_results():
    like_eager(lambda x, w: (x.shape[0] * 2, torch.sin(x), torch.cos(w)), leaf(4), leaf(5),
               loss=lambda outputs: outputs[1].sum(), compile_fn=functools.partial(compile_below_aot, dynamic=True))


def test_where_an_argument_is_written_to():
    def counting(x, w, counter):
        counter.add_(1)
        return torch.sin(x) * counter, torch.cos(w)

    like_eager(counting, leaf(4), leaf(4), torch.ones(4), loss=first)


def test_where_only_what_was_written_to_is_differentiated():
    def add_to(a, b, x, w):
        a.add_(torch.sin(x))
        b.add_(torch.cos(w))

    x, w, a, b = leaf(4), leaf(4), torch.ones(4), torch.ones(4)
    compile_below_aot(add_to)(a, b, x, w)
    a.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert w.grad is None


def test_where_one_compiled_function_calls_into_another():
    passing = compile_below_aot(lambda x, w, v: (x.view(-1), torch.cos(w), torch.sin(v)))
    for used in range(3):
        given = leaf(4), leaf(4), leaf(4)
        passing(*sines(*given[:2]), given[2])[used].sum().backward()
        assert [x.grad is not None for x in given] == [i == used for i in range(3)]


def test_where_another_path_has_one():
    x, w = leaf(4), leaf(4)
    (sines(x, w)[0].sum() + w.sum()).backward()
    assert torch.equal(w.grad, torch.ones(4))


def test_where_gradients_are_asked_for():
    x, w = leaf(4), leaf(4)
    assert torch.autograd.grad(sines(x, w)[0].sum(), (x, w), allow_unused=True)[1] is None
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(sines(x, w)[0].sum(), (x, w))


def test_where_the_graph_is_retained():
    x, w = leaf(4), leaf(4)
    outputs = sines(x, w)
    outputs[0].sum().backward(retain_graph=True)
    assert w.grad is None
    outputs[1].sum().backward()
    torch.testing.assert_close(w.grad, -w.detach().sin())


def test_where_autograd_is_compiled():
    x, w = leaf(4), leaf(4)
    with dynamo.compiled_autograd._enable(torch.compile(backend="jointtrace", options={"executors": ("eager",)})):
        sines(x, w)[0].sum().backward()
    assert x.grad is not None
    assert w.grad is None
