"""Functions where their branches end: at bounds and ties, at 0, far out, and at what is not a number."""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

VALUES = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 6.0, 20.0, -20.0, 100.0, -100.0, 1e4, -1e4,
          math.inf, -math.inf, math.nan)
POINTWISE = {
    "clamp": lambda x: x.clamp(-1.0, 1.0),
    "clamp of a minimum": lambda x: torch.clamp(x, min=0),
    "clamp of a maximum": lambda x: x.clamp(max=1),
    "clamp by tensors": lambda x: x.clamp(torch.tensor(0.0), torch.tensor(1.0)),
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -2.0, 3.0),
    "elu": lambda x: F.elu(x, 2.0),
    "celu": lambda x: F.celu(x, 0.5),
    "selu": F.selu,
    "silu": F.silu,
    "gelu": F.gelu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardshrink": F.hardshrink,
    "softshrink": lambda x: F.softshrink(x[:-1]),  # of nan the decomposition of torch itself has another gradient
    "threshold": lambda x: F.threshold(x, 1.0, 0.0),
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
    "abs": torch.abs,
    "power 0": lambda x: x**0,
    "power 1": lambda x: x**1.0,
    "power 2": lambda x: x**2,
    "power 3": lambda x: torch.pow(x, 3),
    "power 0.5": lambda x: x**0.5,
    "power -1": lambda x: x**-1,
    "power of 2": lambda x: 2.0**x,
    "power of 0": lambda x: 0.0**x,
    "sqrt": torch.sqrt,
    "log": torch.log,
}
IN_PLACE = {
    "relu": lambda x: F.relu(x, inplace=True),
    "relu_": torch.relu_,
    "elu": lambda x: F.elu(x, inplace=True),
    "selu": lambda x: F.selu(x, inplace=True),
    "silu": lambda x: F.silu(x, inplace=True),
    "mish": lambda x: F.mish(x, True),
    "hardtanh": lambda x: F.hardtanh(x, inplace=True),
    "clamp_": lambda x: x.clamp_(0, 1),
    "pow_": lambda x: x.pow_(0),
}


def values() -> Tensor:
    """Return an argument of the values at which gradients go wrong."""
    return torch.tensor(VALUES).requires_grad_()


@pytest.mark.parametrize("name", POINTWISE)
def test_gradients_at_special_values(name, like_eager):
    like_eager(POINTWISE[name], values())


@pytest.mark.parametrize("name", IN_PLACE)
def test_written_in_place(name, like_eager):
    def program(x):
        y = x * 1
        return IN_PLACE[name](y), y

    like_eager(program, values())


@pytest.mark.parametrize("program", [torch.pow, torch.atan2, torch.maximum, torch.minimum],
                         ids=lambda program: program.__name__)
def test_pairs_of_special_values(program, like_eager):
    count = len(VALUES)
    like_eager(program, torch.tensor(VALUES).repeat(count).requires_grad_(),
               torch.tensor(VALUES).repeat_interleave(count).requires_grad_())


def test_bounds_of_a_clamp_have_gradients(like_eager):
    bounds = (torch.full((len(VALUES),), bound).requires_grad_() for bound in (-1.0, 1.0))
    like_eager(torch.clamp, values(), *bounds)


@pytest.mark.also_fused
def test_an_activation_far_out_after_a_product(like_eager):
    def program(x, w):
        return F.elu(x @ w) + F.mish(x @ w) + F.selu(x @ w)

    like_eager(program, torch.tensor([[200.0, 1.0]]).requires_grad_(), torch.eye(2).requires_grad_())


TIED = torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.0, 1.0], [2.0, -1.0, 2.0]])
TIES = {
    "max": lambda x: x.max(0),
    "max, dimension kept": lambda x: torch.max(x, dim=-1, keepdim=True),
    "max of all": lambda x: x.max(),
    "max of two": lambda x: torch.max(x, x * 0 + 1),
    "min": lambda x: x.min(0),
    "amax": lambda x: x.amax(0),
    "topk": lambda x: x.topk(2, 1),
    "sort": lambda x: x.sort(1),
    "median": lambda x: x.median(1),
    "cummax": lambda x: x.cummax(0),
    "max_pool1d": lambda x: F.max_pool1d(x[None], 2),
}


@pytest.mark.parametrize("name", TIES)
def test_a_tie_gives_its_gradient_to_the_same_element(name, like_eager):
    like_eager(lambda x: tuple(out) if isinstance(out := TIES[name](x), tuple) else out, TIED.clone().requires_grad_())


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_a_division_that_rounds_has_a_gradient_of_zeros(mode, like_eager):
    like_eager(lambda x, y: torch.div(x, y, rounding_mode=mode) + x.div(2, rounding_mode=mode),
               torch.randn(3, 3).requires_grad_(), torch.tensor([0.0, 1.0, 2.0]).requires_grad_())


def test_a_rounded_division_of_integers_and_a_remainder(like_eager):
    like_eager(lambda x, n: x * torch.div(n, 2, rounding_mode="floor") + x % 2,
               torch.randn(3).requires_grad_(), torch.tensor([5, -5, 3]))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_rows_of_zeros_are_normalized(p, like_eager):
    like_eager(lambda x: F.normalize(x, p, 1), torch.tensor([[0.0, 0.0, 0.0], [3.0, 4.0, 1.0]]).requires_grad_())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3)])
def test_a_cross_entropy_of_any_number_of_dimensions(shape, reduction, like_eager):
    like_eager(lambda x, t, w: F.cross_entropy(x, t, w, reduction=reduction),
               torch.randn(2, 5, *shape).requires_grad_(), torch.randint(5, (2, *shape)), torch.rand(5))
