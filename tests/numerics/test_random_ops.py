"""Random numbers: the backward uses those that the forward drew, no two draws are one, and a seed brings them back.

What the forward drew is recovered from its results; the gradient must be exact for that.
"""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numerics.oracle import compile_below_aot, jit, leaf
from torch.utils.checkpoint import checkpoint

FRONTENDS = {"thunder": jit, "dynamo": compile_below_aot}
BOTH = pytest.mark.parametrize("frontend", FRONTENDS)
EXECUTORS = pytest.mark.parametrize("executor", ["eager", "torch_compile"])


def again(fn, *args):
    return checkpoint(fn, *args, use_reentrant=False)


def positive(*shape):
    return (torch.rand(shape, dtype=torch.float64) + 0.5).requires_grad_()


@pytest.fixture(autouse=True)
def _forget_compiled_functions():
    torch._dynamo.reset()


def compiled(frontend, fn, executor="eager"):
    return FRONTENDS[frontend](fn, executor)


DRAWS = {  # each returns what the gradient of its argument is multiplied by
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.4),
    "dropout of nothing": lambda x: F.dropout(torch.ones_like(x), 1.0) + 1,
    "rand_like": lambda x: torch.rand_like(x) + 0.1,
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "randn_like": torch.randn_like,
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "randint": lambda x: torch.randint(1, 5, x.shape).to(x.dtype),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "bernoulli of computed probabilities": lambda x: torch.bernoulli(x.detach().sigmoid()),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "multinomial": lambda x: torch.multinomial(x.detach().abs() + 0.1, 2)[:, :1] + 1.0,
}
ONLY_DYNAMO = {  # thunder 0.2.6 knows none of these
    "randperm": lambda x: torch.randperm(x.shape[1]).to(x.dtype),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(1, 2),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "normal": lambda x: torch.normal(torch.zeros_like(x), 1.0),
}
CASES = [pytest.param("thunder", draw, id=f"thunder-{name}") for name, draw in DRAWS.items()] + [
    pytest.param("dynamo", draw, id=f"dynamo-{name}") for name, draw in {**DRAWS, **ONLY_DYNAMO}.items()]
WRAPPED = {
    "alone": lambda fn: fn,
    "in a checkpoint": lambda fn: lambda x: again(fn, x),
    "in a checkpoint in a checkpoint": lambda fn: lambda x: again(lambda y: again(fn, y * 1) * 1, x),
}


# the backward uses what the forward drew

@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize(("frontend", "draw"), CASES)
def test_the_gradient_is_exact_for_what_the_forward_drew(frontend, draw, wrapped):
    x = positive(4, 6)
    out = compiled(frontend, wrapped(lambda x: (x * draw(x)).exp()))(x)
    out.sum().backward()
    drawn = out.detach().log() / x.detach()
    torch.testing.assert_close(x.grad, drawn * out.detach())


@BOTH
@EXECUTORS
def test_dropout_of_an_argument_keeps_its_mask(frontend, executor):
    x = positive(16, 16)
    out = compiled(frontend, lambda x: again(lambda y: F.dropout(y, 0.5) * y, x), executor)(x)
    out.sum().backward()
    mask = out.detach() / x.detach() ** 2
    assert set(mask.round(decimals=6).unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(x.grad, 2 * mask * x.detach())


@BOTH
@EXECUTORS
def test_two_draws_under_one_checkpoint_are_two_and_come_back_each_in_its_place(frontend, executor):
    def inner(x):
        first, second = torch.rand_like(x), torch.rand_like(x)
        return (x * first).exp(), (x * second).exp()

    x = positive(5, 5)
    first, second = compiled(frontend, lambda x: again(inner, x), executor)(x)
    (first + 2 * second).sum().backward()
    drawn = [out.detach().log() / x.detach() for out in (first, second)]
    assert not torch.equal(*drawn)
    torch.testing.assert_close(x.grad, drawn[0] * first.detach() + 2 * drawn[1] * second.detach())


@BOTH
def test_one_function_under_two_checkpoints_draws_twice(frontend):
    def inner(x):
        return (x * torch.rand_like(x)).exp()

    def program(x):
        return again(inner, x), again(inner, x)

    x = positive(5, 5)
    first, second = compiled(frontend, program)(x)
    (first + 2 * second).sum().backward()
    drawn = [out.detach().log() / x.detach() for out in (first, second)]
    assert not torch.equal(*drawn)
    torch.testing.assert_close(x.grad, drawn[0] * first.detach() + 2 * drawn[1] * second.detach())


@BOTH
def test_a_draw_outside_a_checkpoint_between_two_inside_moves_neither(frontend):
    def program(x):
        inside = again(lambda y: (y * torch.rand_like(y)).exp(), x)
        outside = (x * torch.rand_like(x)).exp()
        return inside, outside, again(lambda y: (y * torch.rand_like(y)).exp(), x)

    x = positive(6, 2)
    outs = compiled(frontend, program)(x)
    sum(i * out.sum() for i, out in enumerate(outs, start=1)).backward()
    drawn = [out.detach().log() / x.detach() for out in outs]
    expected = sum(i * d * out.detach() for i, (d, out) in enumerate(zip(drawn, outs, strict=True), start=1))
    torch.testing.assert_close(x.grad, expected)


@BOTH
def test_draws_between_forward_and_backward_change_no_gradient(frontend):
    x = positive(8, 8)
    out = compiled(frontend, lambda x: again(lambda y: (y * torch.rand_like(y)).exp(), x))(x)
    torch.rand(100)
    torch.manual_seed(99)
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach().log() / x.detach() * out.detach())


@BOTH
def test_a_backward_under_a_checkpoint_leaves_the_random_state_alone(frontend):
    out = compiled(frontend, lambda x: again(lambda y: (y * torch.rand_like(y)).exp(), x))(positive(8, 8))
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@BOTH
def test_two_backwards_use_one_draw(frontend):
    x = positive(8, 8)
    out = compiled(frontend, lambda x: again(lambda y: (y * torch.rand_like(y)).exp(), x))(x)
    out.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    out.sum().backward()
    assert torch.equal(first, x.grad)


@BOTH
def test_backwards_in_another_order_than_the_forwards_use_each_its_own_draw(frontend):
    step = compiled(frontend, lambda x: again(lambda y: (y * torch.rand_like(y)).exp(), x))
    pairs = [(x, step(x)) for x in (positive(4, 4), positive(4, 4), positive(4, 4))]
    for x, out in (pairs[1], pairs[0], pairs[2]):
        out.sum().backward()
        torch.testing.assert_close(x.grad, out.detach().log() / x.detach() * out.detach())


# no two draws are one

SAME_SHAPE = {
    "dropout": lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)),
    "rand_like": lambda x: (torch.rand_like(x), torch.rand_like(x)),
    "randn_like": lambda x: (torch.randn_like(x), torch.randn_like(x)),
    "bernoulli": lambda x: (torch.bernoulli(x * 0 + 0.5), torch.bernoulli(x * 0 + 0.5)),
    "randint": lambda x: (torch.randint(0, 99, x.shape), torch.randint(0, 99, x.shape)),
    "exponential": lambda x: (torch.empty_like(x).exponential_(), torch.empty_like(x).exponential_()),
    "multinomial": lambda x: (torch.multinomial(x.detach(), 12), torch.multinomial(x.detach(), 12)),
}


@BOTH
@pytest.mark.parametrize("program", SAME_SHAPE.values(), ids=SAME_SHAPE)
def test_two_draws_of_one_shape_differ(frontend, program):
    first, second = compiled(frontend, program)(positive(12, 12))
    assert not torch.equal(first, second)


@BOTH
def test_the_difference_of_two_draws_is_not_zero(frontend):
    out = compiled(frontend, lambda x: x * (torch.rand_like(x) - torch.rand_like(x)))(positive(9, 9))
    assert out.abs().min() > 0


@BOTH
@pytest.mark.parametrize("program", [F.dropout, torch.rand_like, torch.randn_like], ids=lambda fn: fn.__name__)
def test_two_calls_draw_two_times(frontend, program):
    step = compiled(frontend, lambda x: program(x) * 1)
    x = positive(12, 12)
    assert not torch.equal(step(x), step(x))


@BOTH
def test_a_loop_draws_anew_in_each_turn(frontend):
    def program(x):
        return [F.dropout(x, 0.5) for _ in range(4)]

    masks = [out == 0 for out in compiled(frontend, program)(positive(12, 12))]
    assert not any(torch.equal(masks[i], masks[j]) for i in range(4) for j in range(i))


# a seed brings them back

@BOTH
@EXECUTORS
def test_a_seed_makes_a_run_and_its_gradients_reproducible(frontend, executor):
    def program(x):
        return again(lambda y: F.dropout(y, 0.5) * torch.rand_like(y) + torch.randn_like(y) * y, x)

    step = compiled(frontend, program, executor)
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        x = torch.linspace(1, 2, 30).reshape(5, 6).requires_grad_()
        for _ in range(2):
            out = step(x)
            out.sum().backward()
        runs.append((out.detach(), x.grad))
    assert all(map(torch.equal, *runs))


@BOTH
def test_another_seed_draws_other_numbers(frontend):
    step = compiled(frontend, lambda x: F.dropout(x, 0.5))
    outs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outs.append(step(positive(12, 12)) == 0)
    assert not torch.equal(*outs)


# the numbers are distributed as they must be: 40,000 of one seed, bounds of 6 standard errors

MOMENTS = {  # mean and variance
    "dropout": (lambda x: F.dropout(x, 0.25), 1.0, 1 / 0.75 - 1),
    "rand": (torch.rand_like, 0.5, 1 / 12),
    "randn": (torch.randn_like, 0.0, 1.0),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3, 0.21),
    "randint": (lambda x: torch.randint(0, 10, x.shape).to(x.dtype), 4.5, 8.25),
    "exponential": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.25),
    "multinomial": (lambda x: torch.multinomial(torch.tensor([0.2, 0.8]).expand(200, 2), 200, True).to(x.dtype), 0.8,
                    0.16),
}


@BOTH
@pytest.mark.parametrize("name", MOMENTS)
def test_mean_and_variance_are_those_of_the_distribution(frontend, name):
    fn, mean, variance = MOMENTS[name]
    out = compiled(frontend, lambda x: fn(x) * 1)(torch.ones(200, 200))
    assert abs(float(out.mean()) - mean) < 6 * (variance / out.numel()) ** 0.5
    assert abs(float(out.var()) - variance) < 0.1 * variance


@BOTH
@pytest.mark.parametrize("training", [True, False])
def test_dropout_of_a_module_follows_its_mode(frontend, training):
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.5)).train(training)
    out = compiled(frontend, model)(leaf(8, 16))
    assert bool((out == 0).any()) == training


@BOTH
@pytest.mark.parametrize("grad", [False, True])
def test_a_checkpoint_may_draw_where_nothing_is_differentiated(frontend, grad):
    step = compiled(frontend, lambda x: again(lambda y: F.dropout(y, 0.5), x))
    with torch.set_grad_enabled(grad):
        out = step(torch.ones(12, 12))
    assert 0.2 < float((out == 0).double().mean()) < 0.8


@BOTH
def test_what_bernoulli_draws_requires_a_gradient_which_is_zero(frontend):
    x = leaf(5)
    out = compiled(frontend, lambda x: torch.bernoulli(x.sigmoid()))(x)
    assert out.requires_grad
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros(5))


def test_integers_drawn_with_probabilities_that_have_a_gradient_have_none():
    out = jit(lambda x: torch.multinomial(x.sigmoid(), 3))(leaf(5))
    assert not out.requires_grad


@pytest.mark.parametrize("program", [torch.poisson, F.dropout1d, F.alpha_dropout], ids=lambda fn: fn.__name__)
def test_thunder_refuses_what_would_be_drawn_again_for_the_gradient(program):
    from jointtrace.errors import UnsupportedError

    x = positive(2, 3, 4)
    step = jit(lambda x: program(x) if program is torch.poisson else program(x, 0.5, True))
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        step(x)
