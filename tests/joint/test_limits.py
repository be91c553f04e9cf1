"""Random operations draw once for both directions, or the program is refused; so is what would be silently wrong."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numerics.oracle import assert_like_eager, jit, leaf
from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor
from torch.utils.checkpoint import checkpoint

from jointtrace.errors import UnsupportedError

MASKS = {
    "rand": lambda x: torch.rand(64),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(64),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(0, 5, (64,)),
    "bernoulli": lambda x: torch.bernoulli(x.detach()),
    "poisson": lambda x: torch.poisson(x.detach()),
    "multinomial": lambda x: torch.multinomial(x.detach(), 64, replacement=True),
    "dropout": lambda x: F.dropout(torch.ones(64), 0.5),
}


@pytest.mark.parametrize("draw", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "in a checkpoint"])
def test_the_backward_sees_the_numbers_that_the_forward_drew(draw, recomputed):
    def program(x):
        return x * draw(x)

    x = torch.rand(64, requires_grad=True)
    out = jit(lambda x: checkpoint(program, x, use_reentrant=False) if recomputed else program(x))(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad * x, out)


@pytest.mark.parametrize("name", ["rand", "randn", "randint", "bernoulli", "dropout"])
def test_two_equal_draws_are_two(name):
    draw = MASKS[name]
    first, second = jit(lambda x: (draw(x), draw(x)))(torch.rand(64))
    assert not torch.equal(first, second)


def test_a_seed_gives_the_same_numbers_again_and_no_seed_gives_others():
    compiled = jit(lambda x: x * torch.rand(5) + torch.randn(5))
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(compiled(torch.ones(5)))
    draws.append(compiled(torch.ones(5)))
    assert torch.equal(draws[0], draws[1])
    assert len({tuple(d.tolist()) for d in draws}) == 3


@pytest.mark.parametrize("program", [
    lambda x: F.alpha_dropout(x, 0.5, training=True),
    lambda x: F.dropout1d(x, 0.5),
    lambda x: F.gumbel_softmax(x),
], ids=["alpha_dropout", "dropout1d", "gumbel_softmax"])
def test_a_random_function_without_a_rule_is_refused_where_its_gradient_is_asked_for(program):
    with pytest.raises(UnsupportedError, match=r"test_limits.py:\d+\) draws random numbers"):
        jit(program)(leaf(4, 4))
    assert jit(program)(torch.randn(4, 4)).shape == (4, 4)


def test_complex_gradients_by_linear_maps():
    def program(a, b):
        return torch.cat(((a - 2 * b).t().reshape(-1) * b.view(-1), -a.view(-1) * (1 + 2j)))

    pair = (leaf(3, 2, dtype=torch.complex64) for _ in range(2))
    assert_like_eager(program, *pair, loss=lambda out: torch.view_as_real(out).cos().sum())


def test_a_complex_gradient_that_thunder_does_not_conjugate_is_refused():
    with pytest.raises(UnsupportedError, match=r"the gradient of exp .* complex"):
        jit(lambda x: torch.exp(x))(leaf(3, dtype=torch.complex64))


def test_an_operation_without_a_gradient_rule_is_named_with_its_line():
    executor = OperatorExecutor("without_rules")
    twice = executor.register_operator("twice", meta=lambda x: TensorProxy(like=x), fn=lambda x: x * 2)
    with pytest.raises(UnsupportedError, match=r"no gradient rule for twice \(.*test_limits.py:\d+\)"):
        jit(lambda x: twice(x))(leaf(3))
