"""Second derivatives: a clear error as soon as one is asked for, and never one that is silently zero.

Right are those that torch takes inside a compiled function, or through one by `torch.func`.
"""
from __future__ import annotations

import pytest
import torch
from numerics.oracle import compile_below_aot, jit
from torch.autograd import functional, grad, gradcheck, gradgradcheck

from jointtrace.errors import UnsupportedError

FRONTENDS = {"thunder": jit, "dynamo": compile_below_aot}
BOTH = pytest.mark.parametrize("frontend", FRONTENDS)
REFUSED = (UnsupportedError, RuntimeError)
MESSAGE = "second derivative|double backward"  # ours, AOTAutograd's


pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")


@pytest.fixture(autouse=True)
def _forget_compiled_functions():
    torch._dynamo.reset()


def leaf(*shape):
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def curved(x):
    return torch.sin(x).exp()


def of_grad(step):
    x = leaf(3)
    (first,) = grad(step(x).sum(), x, create_graph=True)
    return grad(first.sum(), x)


def of_backward(step):
    x = leaf(3)
    step(x).sum().backward(create_graph=True)
    return grad(x.grad.sum(), x)


def penalty(step):
    x = leaf(4, 3)
    (first,) = grad(step(x).sum(), x, create_graph=True)
    (step(x).sum() + (first.norm(dim=1) - 1).square().sum()).backward()


def product(step):
    x, v = leaf(3), torch.randn(3, dtype=torch.float64)
    (first,) = grad(step(x).sum(), x, create_graph=True)
    return grad(first @ v, x)


def by_cotangent(step):
    x, v = leaf(3), leaf(3)
    (first,) = grad(step(x), x, v, create_graph=True)
    return grad(first.sum(), v)


def of_two_calls(step):
    x = leaf(3)
    (first,) = grad(step(step(x)).sum(), x, create_graph=True)
    return grad(first.sum(), x)


def of_what_is_no_leaf(step):
    x = leaf(3)
    y = x * 2
    (first,) = grad(step(y + 1).sum(), y, create_graph=True)
    return grad(first.sum(), y)


def in_a_hook(step):
    x, found = leaf(3), []
    out = step(x)

    def hook(_):
        handle.remove()
        with torch.enable_grad():
            (first,) = grad(out.sum(), x, create_graph=True, retain_graph=True)
            found.append(grad(first.sum(), x))

    handle = out.register_hook(hook)
    out.sum().backward()
    return found


def of_a_sum(fn):
    return lambda step: fn(lambda x: step(x).sum(), leaf(3).detach())


ASKED = {
    "grad of grad": of_grad,
    "grad of backward": of_backward,
    "gradient penalty": penalty,
    "product with the Hessian": product,
    "by the cotangent": by_cotangent,
    "through two calls": of_two_calls,
    "of what is no leaf": of_what_is_no_leaf,
    "in a hook": in_a_hook,
    "hessian": of_a_sum(functional.hessian),
    "hvp": lambda step: functional.hvp(lambda x: step(x).sum(), leaf(3).detach(), leaf(3).detach()),
    "vhp": lambda step: functional.vhp(lambda x: step(x).sum(), leaf(3).detach(), leaf(3).detach()),
    "hessian through an operation": lambda step: functional.hessian(lambda x: step(x * 2).sum(), leaf(3).detach()),
    "gradgradcheck": lambda step: gradgradcheck(step, (leaf(3),)),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_thunder_raises_where_a_second_derivative_is_asked_for(ask):
    step = jit(curved)
    with pytest.raises(UnsupportedError, match="second derivative"):
        ask(step)


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_dynamo_raises_where_a_second_derivative_is_asked_for(ask):
    step = compile_below_aot(curved)
    with pytest.raises(REFUSED, match=MESSAGE):
        ask(step)


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_dynamo_raises_where_no_argument_was_kept(ask):
    step = compile_below_aot(lambda x: torch.tanh(x) * 3)
    with pytest.raises(REFUSED, match=MESSAGE):
        ask(step)


PROGRAMS = {
    "a value kept": lambda x: torch.tanh(x) * 3,
    "nothing kept": lambda x: x * 2,
    "an argument kept": lambda x: x * x,
    "a view": lambda x: x.view(-1)[1:],
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_thunder_raises_whatever_it_kept_for_the_backward(program):
    step = jit(program)
    with pytest.raises(UnsupportedError, match="second derivative"):
        functional.hessian(lambda x: step(x).sum(), leaf(3).detach())


def test_the_derivative_by_one_argument_of_that_by_another_raises():
    x, w = leaf(3), leaf(3)
    (by_x,) = grad(jit(lambda x, w: x.tanh() + w * x)(x, w).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        grad(by_x.sum(), w)


def test_a_penalty_on_the_parameters_of_a_module_raises():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    step = jit(model)
    grads = grad(step(leaf(2, 3)).sum(), [*model.parameters()], create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        sum(g.square().sum() for g in grads).backward()


# first derivatives are right, however they are asked for

@BOTH
def test_the_first_derivative_with_a_graph_is_the_one_without(frontend):
    step, x = FRONTENDS[frontend](curved), leaf(3)
    (kept,) = grad(step(x).sum(), x, create_graph=True)
    (plain,) = grad(step(x).sum(), x)
    torch.testing.assert_close(kept.detach(), plain)
    torch.testing.assert_close(plain, grad(curved(x).sum(), x)[0])


@BOTH
def test_gradcheck_passes(frontend):
    assert gradcheck(FRONTENDS[frontend](lambda x, y: (curved(x) * y, y.tanh())), (leaf(3), leaf(3)))


@BOTH
def test_the_jacobian_is_eagers(frontend):
    x = leaf(3).detach()
    torch.testing.assert_close(functional.jacobian(FRONTENDS[frontend](curved), x), functional.jacobian(curved, x))


@BOTH
def test_a_graph_that_is_created_and_dropped_costs_nothing_but_memory(frontend):
    step, x = FRONTENDS[frontend](curved), leaf(3)
    step(x).sum().backward(create_graph=True)
    first, x.grad = x.grad.detach(), None
    curved(x).sum().backward()
    torch.testing.assert_close(first, x.grad)


def test_create_graph_through_a_compiled_function_leaves_other_second_derivatives_right():
    x, y = leaf(3), leaf(3)
    out = jit(curved)(x).sum() + (y ** 3).sum()
    (by_y,) = grad(out, y, create_graph=True)
    torch.testing.assert_close(grad(by_y.sum(), y)[0], 6 * y.detach())


# by torch.func, Dynamo takes them inside

@pytest.mark.parametrize("twice", [
    lambda f: torch.func.grad(lambda x: torch.func.grad(lambda y: f(y).sum())(x).sum()),
    lambda f: torch.func.hessian(lambda x: f(x).sum()),
    lambda f: torch.func.jacrev(torch.func.jacrev(lambda x: f(x).sum())),
], ids=["grad of grad", "hessian", "jacrev of jacrev"])
def test_second_derivatives_by_torch_func_are_right_or_refused(twice):
    x = leaf(3).detach()
    torch.testing.assert_close(twice(compile_below_aot(curved))(x), twice(curved)(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="TensorWrapper"):
        twice(jit(curved))(x)


def test_a_gradient_taken_inside_a_compiled_function_has_its_own():
    def slope(x):
        return torch.func.grad(lambda y: torch.sin(y).sum())(x) * x

    x, same = leaf(3), leaf(3)
    same.data = x.detach().clone()
    compile_below_aot(slope)(x).sum().backward()
    slope(same).sum().backward()
    torch.testing.assert_close(x.grad, same.grad)
