"""function_apply: custom autograd functions trace although `apply` is a builtin."""
from __future__ import annotations

import pytest
import thunder
import torch

from jointtrace.compat.function_apply import TORCH, python_apply
from jointtrace.compat.versions import torch_in
from tests.compat.functions import Multiply, assert_like_eager

ONLY_THERE = pytest.mark.skipif(not torch_in(TORCH), reason=f"holds for torch{TORCH}")


def test_a_custom_function_has_eager_gradients():
    def program(x, y):
        return Multiply.apply(x.sin(), y) + y

    assert_like_eager(thunder.jit(program), program, (3,), (3,))


def test_a_custom_function_is_one_symbol_of_the_trace():
    traced = thunder.jit(lambda x, y: Multiply.apply(x, y))
    traced(torch.ones(2), torch.ones(2))
    names = [bound.sym.name for bound in thunder.last_traces(traced)[0].bound_symbols]
    assert any(name.startswith("Multiply") for name in names), names


def test_two_functions_are_told_apart():
    def program(x, y):
        return Multiply.apply(x, y) + Multiply.apply(y, x.cos())

    assert_like_eager(thunder.jit(program), program, (3,), (3,))


def test_other_builtin_class_methods_are_left_alone():
    def program(x):
        return x * float.fromhex("0x1p-1") * len(Multiply.mro())

    assert_like_eager(thunder.jit(program), program, (3,))


@ONLY_THERE
def test_apply_works_inside_the_block():
    builtin = torch.autograd.Function.apply
    x = torch.ones(2, requires_grad=True)
    with python_apply():
        assert torch.autograd.Function.apply.__func__
        Multiply.apply(x, 3 * x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 6.0))
    assert torch.autograd.Function.apply == builtin


@ONLY_THERE
def test_apply_is_a_builtin_again_when_the_block_fails():
    with pytest.raises(KeyError), python_apply():
        raise KeyError
    assert not hasattr(torch.autograd.Function.apply, "__func__")
