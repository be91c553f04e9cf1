"""Programs that ask for dtypes, write attributes and make modules while they are traced run as in Python."""
from __future__ import annotations

import os

import pytest
import thunder
import torch
from numerics.oracle import assert_like_eager, jit, leaf
from thunder.core.interpreter import InterpreterError

from jointtrace.errors import UnsupportedError


def test_a_dtype_equals_itself():
    def double_if_float(x):
        return x * (2 if x.dtype == torch.float32 else 3)

    assert_like_eager(double_if_float, leaf(4))


def test_a_dtype_is_found_in_a_tuple_and_in_a_dict():
    def scaled(x):
        return x * {torch.float32: 2, torch.float64: 3}[x.dtype] * (5 if x.dtype in (torch.half, torch.float32) else 7)

    assert_like_eager(scaled, leaf(4))


def test_a_dtype_is_the_one_that_torch_has():
    def scaled(x):
        return x * (2 if x.dtype is torch.float32 and x.dtype.is_floating_point else 3)

    assert_like_eager(scaled, leaf(4))


def test_a_dtype_can_be_handed_on():
    def converted(x, y):
        return y.to(x.dtype) * x, torch.zeros(2, dtype=x.dtype)

    assert_like_eager(converted, leaf(4), leaf(4, dtype=torch.float64))


class _Counter:
    count = 0
    kept: object = None


def test_the_last_value_written_to_an_attribute_is_kept():
    counter = _Counter()

    def counted_twice(x):
        counter.count = counter.count + 1
        y = x * counter.count
        counter.count = counter.count + 1
        return y * counter.count

    compiled = thunder.jit(counted_twice, delay_trace_split=True, jointtrace={"executors": ("eager",)})
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [2, 12, 30]
    assert counter.count == 6


def test_an_attribute_may_hold_anything_until_it_is_set_back():
    counter = _Counter()

    def collected(x):
        counter.kept = {"x": [x]}
        y = x * len(counter.kept)
        counter.kept = None
        return y

    assert_like_eager(collected, leaf(4))
    assert counter.kept is None


class _MakesItsLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x, labels):
        return torch.nn.CrossEntropyLoss()(self.linear(x), labels)


def test_a_module_with_buffers_may_be_made_by_the_program():
    assert_like_eager(_MakesItsLoss(), torch.randn(2, 4), torch.tensor([0, 2]))


def test_without_the_option_thunder_is_as_it_was():
    def equal(x):
        return x.dtype == torch.float32

    assert not thunder.jit(equal)(torch.ones(1))


def test_code_of_thunder_itself_is_given_thunders_dtype():
    own = {"dtypes": thunder.core.dtypes}
    file = os.path.join(os.path.dirname(thunder.__file__), "backend.py")
    exec(compile("def is_float(x): return dtypes.is_float_dtype(x.dtype)", file, "exec"), own)
    x = leaf(4)
    assert torch.equal(jit(lambda x: x * (1 if own["is_float"](x) else 3))(x), x)


def test_a_branch_on_a_number_that_the_program_computes_is_refused():
    def shifted(x):
        if x[0].item() > 5:
            return x + 1
        return x * 2

    with pytest.raises((UnsupportedError, InterpreterError), match=r"branches on a number .*test_thunder_python"):
        jit(shifted)(torch.tensor([9.0, 1.0]))


def test_a_branch_on_a_number_that_is_known_is_taken():
    assert_like_eager(lambda x, n: x + 1 if n > 5 and x.shape[0] * 2 > 3 else x * 2, leaf(2), 6)


@pytest.mark.parametrize("error", [IndexError, UnsupportedError])
def test_a_wrong_argument_is_caught_as_the_error_that_eager_raises(error):
    def program(x):
        return x.sum(4)

    if error is IndexError:
        with pytest.raises(error, match=r"(?i)dimension out of range"):
            program(leaf(2, 2))
    with pytest.raises(error, match=r"(?i)dimension out of range"):
        jit(program)(leaf(2, 2))
