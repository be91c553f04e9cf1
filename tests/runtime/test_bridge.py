"""The autograd bridge, with hand-written functions in place of compiled ones; eager is the reference."""
from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from jointtrace.errors import UnsupportedError
from jointtrace.runtime.bridge import connect


def product_backward(collections, cotangents):
    saved, other = collections
    x, w = saved
    saved.clear()
    other.clear()
    (g,) = cotangents
    cotangents.clear()
    return g * w, g * x


def product(x, w, backward_fn=product_backward, **changes):
    """x * w through the bridge."""
    with torch.no_grad():
        out = x * w
    given = {
        "flat_args": [x, w], "flat_output": [out], "saved_tensors": [x, w], "saved_other": [],
        "differentiable": (True,), "depends": (frozenset({0}), frozenset({0})), **changes,
    }
    connect(backward_fn, *given.values())
    return given["flat_output"][0]


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def two_results(x, w, differentiable=(True, True)):
    """(sin x, cos w) through the bridge: each gradient depends on its own result alone."""

    def backward_fn(collections, cotangents):
        (x, w), _ = collections
        g0, g1 = cotangents
        collections[0].clear()
        cotangents.clear()
        return g0 * torch.cos(x), -g1 * torch.sin(w)

    with torch.no_grad():
        results = (x.sin(), w.cos())
    connect(backward_fn, [x, w], results, [x, w], [], differentiable, (frozenset({0}), frozenset({1})))
    return results


@contextmanager
def no_gc():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_gradients_equal_those_of_eager():
    x, w = leaf(3), leaf(3)
    g = torch.randn(3)
    expected = torch.autograd.grad(x * w, (x, w), g)
    actual = torch.autograd.grad(product(x, w), (x, w), g)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_the_very_output_tensor_gets_a_grad_fn():
    x, w = leaf(3), leaf(3)
    with torch.no_grad():
        out = x * w
    connect(product_backward, [x, w], [out], [x, w], [], (True,), (frozenset({0}), frozenset({0})))
    assert out.requires_grad
    assert out.grad_fn is not None


def test_works_where_the_caller_turned_gradients_off():
    x, w = leaf(3), leaf(3)
    with torch.no_grad():
        out = product(x, w)
    assert out.requires_grad


def test_an_output_that_is_not_differentiable_does_not_require_grad():
    a, b = two_results(leaf(3), leaf(3), differentiable=(True, False))
    assert a.requires_grad
    assert not b.requires_grad


def test_an_integer_output_does_not_require_grad():
    x, w = leaf(3), leaf(3)
    with torch.no_grad():
        results = [x * w, torch.argmax(x)]
    connect(lambda c, g: product_backward(c, g[:1]), [x, w], results, [x, w], [], (True, True),
            (frozenset({0}), frozenset({0})))
    assert not results[1].requires_grad
    results[0].sum().backward()
    torch.testing.assert_close(x.grad, w.detach())


def test_a_gradient_without_any_cotangent_is_none():
    x, w = leaf(3), leaf(3)
    a, _ = two_results(x, w)
    a.sum().backward()
    assert x.grad is not None
    assert w.grad is None


def test_the_backward_is_not_run_where_no_gradient_depends_on_the_cotangents():
    x, w = leaf(3), leaf(3)

    def backward_fn(collections, cotangents):
        raise AssertionError("run")

    with torch.no_grad():
        out = x * w
    connect(backward_fn, [x, w], [out, x.detach()], [x, w], [], (True, True), (frozenset({1}), frozenset({1})))
    out.sum().backward()
    assert x.grad is None


def test_a_missing_cotangent_that_is_read_counts_as_zeros():
    x = leaf(3, 2)
    seen = []

    def backward_fn(collections, cotangents):
        seen.extend(cotangents)
        (x,) = collections[0]
        collections[0].clear()
        g0, g1 = cotangents
        cotangents.clear()
        return (g0 * torch.cos(x) - g1.t() * torch.sin(x),)

    with torch.no_grad():
        results = (x.sin(), x.cos().t())
    connect(backward_fn, [x], results, [x], [], (True, True), (frozenset({0, 1}),))
    results[0].sum().backward()
    torch.testing.assert_close(x.grad, torch.cos(x.detach()))
    assert (seen[1].shape, seen[1].stride()) == ((2, 3), (1, 2))


@pytest.mark.parametrize("cotangent", [
    torch.ones(()).expand(3, 4), torch.randn(4, 3).t(), torch.randn(6, 4)[::2], torch.randn(3, 4),
], ids=["stride 0", "transposed", "sliced", "right"])
def test_cotangents_get_the_strides_of_their_outputs(cotangent):
    x, w = leaf(3, 4), leaf(3, 4)
    seen = []

    def backward_fn(collections, cotangents):
        seen.append(cotangents[0].stride())
        return product_backward(collections, cotangents)

    out = product(x, w, backward_fn)
    actual = torch.autograd.grad(out, (x, w), cotangent)
    torch.testing.assert_close(actual, (cotangent * w, cotangent * x))
    assert seen == [(4, 1)]


def test_a_cotangent_of_a_transposed_output_is_transposed():
    x, w = leaf(3, 4), leaf(3, 4)
    seen = []

    def backward_fn(collections, cotangents):
        seen.append(cotangents[0].stride())
        return product_backward(collections, [cotangents[0].t()])

    with torch.no_grad():
        out = (x * w).t()
    connect(backward_fn, [x, w], [out], [x, w], [], (True,), (frozenset({0}), frozenset({0})))
    out.backward(torch.ones(4, 3))
    assert seen == [(1, 4)]


def test_a_cotangent_of_an_expanded_output_is_contiguous():
    x = leaf(4)
    seen = []

    def backward_fn(collections, cotangents):
        seen.append(cotangents[0].stride())
        return (cotangents[0].sum(0),)

    with torch.no_grad():
        out = x.sin().expand(3, 4)
    connect(backward_fn, [x], [out], [], [], (True,), (frozenset({0}),))
    out.backward(torch.ones(3, 4))
    assert seen == [(4, 1)]


def test_a_cotangent_with_the_right_strides_is_not_copied():
    x, w = leaf(3), leaf(3)
    cotangent = torch.ones(3)
    seen = []

    def backward_fn(collections, cotangents):
        seen.append(cotangents[0].data_ptr())
        return product_backward(collections, cotangents)

    product(x, w, backward_fn).backward(cotangent)
    assert seen == [cotangent.data_ptr()]


def test_a_cotangent_that_differs_in_a_dimension_of_size_one_is_not_copied():
    x, w = leaf(1, 3), leaf(1, 3)
    cotangent = torch.ones(3, 1).t()
    seen = []

    def backward_fn(collections, cotangents):
        seen.append((cotangents[0].data_ptr(), cotangents[0].stride()))
        return product_backward(collections, cotangents)

    product(x, w, backward_fn).backward(cotangent)
    assert seen == [(cotangent.data_ptr(), (3, 1))]


def test_saved_tensors_and_cotangents_die_during_the_backward():
    x, w = leaf(1000), leaf(1000)
    alive: dict[str, bool] = {}

    def backward_fn(collections, cotangents):
        (saved,), _ = collections
        collections[0].clear()
        (g,) = cotangents
        cotangents.clear()
        refs = {"saved": weakref.ref(saved), "cotangent": weakref.ref(g)}
        gx = g * saved
        del g, saved
        alive.update({name: ref() is not None for name, ref in refs.items()})
        return gx, gx

    with torch.no_grad():
        out = x * w
        saved = x + w
    connect(backward_fn, [x, w], [out], [saved], [], (True,), (frozenset({0}), frozenset({0})))
    del saved
    (out * 2).sum().backward()
    assert alive == {"saved": False, "cotangent": False}


def test_a_copied_cotangent_dies_during_the_backward_as_well():
    x, w = leaf(10), leaf(10)
    alive = []

    def backward_fn(collections, cotangents):
        (g,) = cotangents
        cotangents.clear()
        ref = weakref.ref(g)
        gx = g * 2
        del g
        alive.append(ref() is not None)
        return gx, gx

    product(x, w, backward_fn).sum().backward()
    assert alive == [False]


def test_a_second_backward_raises_torchs_own_error():
    out = product(leaf(3), leaf(3)).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


def test_a_second_backward_works_where_the_graph_is_retained():
    def backward_fn(collections, cotangents):
        cotangents[0] = cotangents[0] * collections[1].pop()
        return product_backward(collections, cotangents)

    x, w = leaf(3), leaf(3)
    out = product(x, w, backward_fn, saved_other=[10]).sum()
    out.backward(retain_graph=True)
    out.backward()
    torch.testing.assert_close(x.grad, 20 * w.detach())


def test_a_second_backward_works_where_nothing_is_saved_as_in_eager():
    x = leaf(3)
    with torch.no_grad():
        out = x * 2

    def backward_fn(collections, cotangents):
        return (cotangents.pop() * 2,)

    connect(backward_fn, [x], [out], [], [], (True,), (frozenset({0}),))
    for _ in range(2):
        out.backward(torch.ones(3))
    torch.testing.assert_close(x.grad, torch.full((3,), 4.0))


def test_writing_to_a_saved_tensor_raises_as_in_eager():
    x, w = leaf(3), torch.randn(3)
    out = product(x, w)
    w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_derivative_raises():
    x, w = leaf(3), leaf(3)
    (gx,) = torch.autograd.grad(product(x, w).sum(), x, create_graph=True)
    assert gx.requires_grad
    with pytest.raises(UnsupportedError, match="second derivative"):
        gx.sum().backward()


def test_create_graph_gives_the_right_first_derivative():
    x, w = leaf(3), leaf(3)
    gx, gw = torch.autograd.grad(product(x, w).sum(), (x, w), create_graph=True)
    torch.testing.assert_close((gx.detach(), gw.detach()), (w.detach(), x.detach()))


def test_create_graph_keeps_missing_gradients_none():
    x, w = leaf(3), leaf(3)
    a, _ = two_results(x, w)
    gx, gw = torch.autograd.grad(a.sum(), (x, w), create_graph=True, allow_unused=True)
    assert gx is not None
    assert gw is None


def test_saved_tensor_hooks_see_what_is_saved():
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor

    x, w = leaf(3), leaf(3)
    with saved_tensors_hooks(pack, lambda t: t * 10):
        out = product(x, w)
    out.sum().backward()
    assert packed == [(3,), (3,)]
    torch.testing.assert_close(x.grad, w.detach() * 10)


def test_save_on_cpu_works():
    x, w = leaf(3), leaf(3)
    with save_on_cpu():
        out = product(x, w)
    out.sum().backward()
    torch.testing.assert_close(x.grad, w.detach())


def test_an_outer_checkpoint_keeps_nothing_and_runs_the_forward_again():
    x, w = leaf(3), leaf(3)
    calls = []

    def block(x, w):
        calls.append(None)
        return product(x, w)

    out = torch.utils.checkpoint.checkpoint(block, x, w, use_reentrant=False)
    out.sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(x.grad, w.detach())


def test_an_input_returned_as_it_is_stays_the_same_tensor():
    x, w = leaf(3), leaf(3)
    results = [x.detach() * w.detach(), x]
    connect(lambda c, g: product_backward(c, g[:1]), [x, w], results, [x, w], [], (True, True),
            (frozenset({0, 1}), frozenset({0})))
    assert results[1] is x
    assert x.is_leaf
    (results[0] + results[1]).sum().backward()
    torch.testing.assert_close(x.grad, w.detach() + 1)


def test_a_tensor_returned_twice_gets_both_cotangents():
    x, w = leaf(3), leaf(3)
    with torch.no_grad():
        out = x * w
    def backward_fn(collections, cotangents):
        total = cotangents[0] + cotangents[1]
        cotangents.clear()
        return product_backward(collections, [total])

    connect(backward_fn, [x, w], [out, out], [x, w], [], (True, True), (frozenset({0, 1}), frozenset({0, 1})))
    (out.sum() + (out * 2).sum()).backward()
    torch.testing.assert_close(x.grad, 3 * w.detach())


def test_outputs_and_arguments_may_be_no_tensors():
    x, w = leaf(3), leaf(3)
    with torch.no_grad():
        results = [3, None, x * w, "text"]

    def backward_fn(collections, cotangents):
        assert [g is None for g in cotangents] == [True, True, False, True]
        return None, *product_backward(collections, [cotangents[2]]), None

    connect(backward_fn, [2, x, w, None], results, [x, w], [], (True,) * 4,
            (frozenset(), frozenset({2}), frozenset({2}), frozenset()))
    results[2].sum().backward()
    torch.testing.assert_close(x.grad, w.detach())


def test_gradients_are_dropped_where_only_the_effects_of_the_backward_count():
    x, w = leaf(3), leaf(3)
    calls = []

    def backward_fn(collections, cotangents):
        calls.append(None)
        return product_backward(collections, cotangents)

    with torch.no_grad():
        out = x * w
    connect(backward_fn, [x, w], [out], [x, w], [], (True,), (frozenset({0}), frozenset({0})), drop_grads=True)
    out.sum().backward()
    assert calls
    assert x.grad is None


def saves_nothing_more(x, out):
    return []


def saves_an_activation(x, out):
    return [torch.exp(x.detach())]


def saves_the_output(x, out):
    return [out]


def saves_a_view_of_the_output(x, out):
    return [out[1:]]


@pytest.mark.parametrize(
    "saves", [saves_nothing_more, saves_an_activation, saves_the_output, saves_a_view_of_the_output]
)
@pytest.mark.parametrize("make", [lambda x: x.sin(), lambda x: x.sin().t()], ids=["own memory", "view"])
def test_nothing_is_kept_alive_once_the_output_is_gone(saves: Callable, make: Callable):
    x = leaf(4, 4)
    with no_gc():
        with torch.no_grad():
            out = make(x)
            saved = saves(x, out)
        connect(lambda c, g: (g[0],), [x], [out], saved, [], (True,), (frozenset({0}),))
        refs = [weakref.ref(out), *map(weakref.ref, saved)]
        del out, saved
        assert [ref() for ref in refs] == [None] * len(refs)


def test_nothing_is_kept_alive_after_the_backward():
    x = leaf(4)
    with no_gc():
        with torch.no_grad():
            out, saved = x.sin(), x.cos()
        ref = weakref.ref(saved)

        def backward_fn(collections, cotangents):
            return (cotangents.pop() * collections[0].pop(),)

        connect(backward_fn, [x], [out], [saved], [], (True,), (frozenset({0}),))
        del saved
        out.sum().backward()
        assert ref() is None


def test_the_backward_runs_in_another_thread():
    x, w = leaf(3), leaf(3)
    out = product(x, w).sum()
    thread = threading.Thread(target=out.backward)
    thread.start()
    thread.join()
    torch.testing.assert_close(x.grad, w.detach())
