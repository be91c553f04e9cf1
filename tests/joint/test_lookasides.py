"""lookasides: torch functions that thunder does not know, or not in this use."""
from __future__ import annotations

import pytest
import thunder
import torch
from numerics.oracle import assert_like_eager, jit, leaf

from jointtrace.errors import UnsupportedError

F = torch.nn.functional


@pytest.mark.parametrize("fn", [
    lambda x: torch.flip(x, dims=(0,)),
    lambda x: torch.gradient(x)[0],
    lambda x: torch.as_strided(x, (2, 2), (1, 2)),
    lambda x: torch.ops.aten._safe_softmax.default(x, 0),
    lambda x: torch.ops.aten._softmax_backward_data(x, x.detach().softmax(0), 0, x.dtype),
], ids=["keyword", "unknown", "view", "overload", "packet"])
def test_a_function_that_thunder_does_not_know_runs(fn):
    assert_like_eager(fn, leaf(4, 3))


@pytest.mark.parametrize("fn", [
    lambda x: F.pad(x, (1, 2), mode="reflect"),
    lambda x: F.interpolate(x, size=7, mode="linear"),
    lambda x: F.avg_pool1d(x, 2, ceil_mode=True),
    lambda x: torch.round(x, decimals=1) * x,
], ids=["pad", "interpolate", "ceil_mode", "decimals"])
def test_a_use_that_thunder_does_not_know_runs(fn):
    assert_like_eager(fn, leaf(2, 3, 5))


@pytest.mark.parametrize("fn", [
    lambda x: F.max_pool1d(x, 2, padding=1, dilation=3),
    lambda x: F.interpolate(x, size=7, mode="nearest"),
    lambda x: torch.take_along_dim(x, torch.tensor([[[-1]]]), 2),
    lambda x: torch.var(x, True),
    lambda x: torch.atleast_3d(x[0, 0]),
], ids=["max_pool", "interpolate", "take_along_dim", "unbiased", "atleast"])
def test_what_thunder_computes_wrongly_is_eagers(fn):
    assert_like_eager(fn, leaf(2, 3, 5))


def test_where_dropout_drops_all_there_is_a_gradient_of_zeros():
    assert_like_eager(lambda x: F.dropout(x, 1.0), leaf(4))


def test_a_method_that_thunder_does_not_know_runs():
    assert_like_eager(lambda x: x.take_along_dim(torch.tensor([[1]]), 1) + x.as_strided((2, 1), (1, 1)), leaf(2, 3))


def test_a_tensor_has_a_layout():
    assert_like_eager(lambda x: x * 2 if x.layout is torch.strided else x * 3, leaf(2, 3))


def test_what_torch_has_no_method_for_is_no_attribute():
    compiled = jit(lambda x: x * 2 if hasattr(x, "no_such_method") else x * 3)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))


def test_what_depends_on_strides_is_refused():
    with pytest.raises(UnsupportedError, match=r"stride .*test_lookasides.py:\d+.*returns no tensor"):
        jit(lambda x: x * x.stride(0))(leaf(2, 3).t())


def test_operators_of_one_python_name_are_not_taken_for_each_other():
    aten = torch.ops.aten
    assert_like_eager(lambda x: aten._safe_softmax.default(x, 0) + aten.slice.Tensor(x, 0, 0, 4), leaf(4, 3))


def test_an_error_of_the_program_stays_what_it_is():
    with pytest.raises(IndexError, match="Dimension out of range"):
        jit(lambda x: torch.flip(x, dims=(3,)))(leaf(4))


def test_a_write_through_a_view_that_thunder_does_not_know_reaches_the_tensor():
    def fn(x):
        y = x * 2
        torch.as_strided(y, (2, 3), (3, 1)).mul_(3)
        return y

    assert_like_eager(fn, leaf(4, 3))


def test_sizes_that_depend_on_values_are_refused():
    with pytest.raises(UnsupportedError, match=r"masked_select .*test_lookasides.py:\d+.*depend on values"):
        jit(lambda x: torch.masked_select(x, x > 0))(leaf(4))


def test_a_write_to_an_argument_is_refused():
    mean, var = torch.zeros(3), torch.ones(3)
    with pytest.raises(UnsupportedError, match=r"instance_norm .*running statistics"):
        jit(lambda x: F.instance_norm(x, mean, var))(leaf(2, 3, 5))


def test_without_the_option_thunder_does_as_before():
    with pytest.raises(NotImplementedError, match="not yet supported"):
        thunder.jit(lambda x: torch.gradient(x)[0])(leaf(4, 3))
