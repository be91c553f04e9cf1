"""by_autograd: gradients by torch's own autograd, where thunder has no rule or a wrong one."""
from __future__ import annotations

import pytest
import torch
from numerics.oracle import assert_like_eager, jit, leaf

from jointtrace.errors import UnsupportedError

F = torch.nn.functional
BINARY = [torch.minimum, torch.remainder, torch.copysign]


@pytest.mark.parametrize("fn", BINARY, ids=[fn.__name__ for fn in BINARY])
def test_a_function_without_a_rule_of_thunder_has_eagers_gradients(fn):
    assert_like_eager(fn, leaf(3, 4), leaf(4))


def test_a_product_with_a_zero_in_it_has_eagers_gradient():
    x = torch.tensor([2.0, 0.0, 3.0]).requires_grad_()
    assert_like_eager(lambda x: torch.prod(x), x)


def test_values_that_broadcast_where_they_are_put_have_a_gradient():
    assert_like_eager(lambda x, v: torch.index_put(x, (torch.tensor([0, 2]),), v), leaf(3, 5), leaf(1, 5))


def test_windows_of_a_tensor_are_not_taken_for_columns_of_an_image():
    assert_like_eager(lambda x: x.unfold(0, 2, 1) * 2, leaf(5, 3))


def test_tensors_in_a_list_have_gradients():
    assert_like_eager(lambda x, y: torch.hstack([x, y]), leaf(3), leaf(2))


def test_results_that_eager_does_not_differentiate_require_no_gradient():
    assert_like_eager(lambda x: tuple(torch.linalg.lu(x)), leaf(3, 3))


def test_an_argument_without_a_gradient_in_eager_has_none():
    assert_like_eager(lambda x, q: torch.quantile(x, q), leaf(6), torch.tensor([0.2, 0.7]).requires_grad_())


def test_a_tensor_given_by_keyword_has_a_gradient():
    assert_like_eager(lambda x, y, w: torch.lerp(x, end=y, weight=w), leaf(4, 3), leaf(4, 3), leaf(3))


def test_tensors_given_by_keyword_are_not_taken_for_each_other():
    target = torch.rand(4, 3)
    assert_like_eager(lambda x, w, p: F.binary_cross_entropy_with_logits(x, target, weight=w, pos_weight=p),
                      leaf(4, 3), torch.rand(4, 3), torch.rand(3))


def test_an_unused_result_of_a_scalar_shape_has_zeros_for_a_cotangent():
    assert_like_eager(lambda x: torch.kthvalue(x, 2)[0], leaf(4))


def test_one_function_has_a_rule_for_each_set_of_arguments_that_require_a_gradient():
    compiled = jit(torch.minimum)
    for first, second in ((True, True), (True, False), (False, True)):
        x, y = torch.randn(3).requires_grad_(first), torch.randn(3).requires_grad_(second)
        assert_like_eager(torch.minimum, x, y, compiled=compiled)


@pytest.mark.filterwarnings("ignore:torch.*autocast:DeprecationWarning")  # thunder asks the old way
def test_a_function_that_autocast_leaves_alone_runs_under_it():
    with torch.autocast("cpu", torch.bfloat16):
        assert_like_eager(torch.minimum, leaf(3, 4), leaf(4))
        assert_like_eager(lambda x: torch.flip(x, dims=(0,)) * 2, leaf(3, 4))


@pytest.mark.filterwarnings("ignore:torch.*autocast:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated:UserWarning")  # once in a process
def test_a_function_that_autocast_runs_in_another_dtype_is_refused():
    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.chain_matmul(x, x)

    with pytest.raises(UnsupportedError, match=r"chain_matmul .*test_by_autograd.py:\d+.*autocast"):
        jit(fn)(leaf(3, 3))


def test_a_random_function_without_a_rule_is_refused():
    with pytest.raises(UnsupportedError, match=r"alpha_dropout .*test_by_autograd.py:\d+.*draws random numbers"):
        jit(lambda x: F.alpha_dropout(x, 0.5, True))(leaf(4))


def test_a_sparse_result_is_refused():
    with pytest.raises(UnsupportedError, match="sparse"):
        jit(lambda x: x.to_sparse())(leaf(3, 3))


def test_running_statistics_that_thunder_would_not_update_are_refused():
    mean, var = torch.zeros(2), torch.ones(2)
    with pytest.raises(UnsupportedError, match="running statistics"):
        jit(lambda x: torch.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5)[0])(leaf(3, 2))
