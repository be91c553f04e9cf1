"""Products and losses under autocast have eager's dtype and gradients, also where thunder has no rule for them."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numerics.oracle import assert_like_eager, jit, leaf

PRODUCTS = {
    "addbmm": (torch.addbmm, (3, 5), (2, 3, 4), (2, 4, 5)),
    "addmm": (torch.addmm, (5,), (3, 4), (4, 5)),
    "baddbmm": (torch.baddbmm, (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    "bmm": (torch.bmm, (2, 3, 4), (2, 4, 5)),
    "conv_transpose1d": (F.conv_transpose1d, (1, 3, 4), (3, 5, 2)),
    "conv_transpose2d": (F.conv_transpose2d, (1, 3, 4, 4), (3, 5, 2, 2)),
    "conv_transpose3d": (F.conv_transpose3d, (1, 3, 4, 4, 4), (3, 5, 2, 2, 2)),
    "linear": (F.linear, (3, 4), (5, 4)),
    "matmul": (torch.matmul, (3, 4), (4, 5)),
    "mm": (torch.mm, (3, 4), (4, 5)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_runs_in_low_precision(name):
    product, *shapes = PRODUCTS[name]

    def in_bfloat16(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return product(*args)

    assert_like_eager(in_bfloat16, *(leaf(*shape) for shape in shapes), rtol=2e-2, atol=2e-2)


LOSSES = {
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 2, 1])),
    "mse_loss": lambda x: F.mse_loss(x, torch.ones(3, 4)),
    "prod": lambda x: x.prod(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_low_precision_runs_in_float32(name):
    def loss(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return LOSSES[name](x @ w)

    assert_like_eager(loss, leaf(3, 4), leaf(4, 4), rtol=2e-2, atol=2e-2)


def test_double_precision_is_left_alone():
    def in_bfloat16(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.mm(*args)

    assert_like_eager(in_bfloat16, leaf(3, 4, dtype=torch.float64), leaf(4, 5, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:torch.*autocast:DeprecationWarning")  # thunder asks the old way
def test_autocast_around_the_call_counts():
    compiled = jit(lambda b, x, w: torch.addmm(b, x, w).relu())
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(leaf(5), leaf(3, 4), leaf(4, 5)).dtype is torch.bfloat16
    assert compiled(leaf(5), leaf(3, 4), leaf(4, 5)).dtype is torch.float32
