"""Arguments that are one tensor, or share memory, in functions that write in place."""
from __future__ import annotations

import pytest
import thunder
import torch
from numerics.oracle import assert_like_eager, jit, leaf

from jointtrace.errors import UnsupportedError


def write_both(a, b):
    return a.exp_() + b.tanh_(), a


def test_one_tensor_in_two_places_is_written_through_both():
    a = torch.randn(2, 2)
    compiled = assert_like_eager(write_both, a, a)
    assert_like_eager(write_both, a, torch.randn(2, 2), compiled=compiled)
    assert_like_eager(write_both, a, a, compiled=compiled)
    assert thunder.cache_misses(compiled) == 2


def test_a_view_of_all_of_an_argument_is_that_argument():
    a = torch.randn(2, 2)
    assert_like_eager(write_both, a, a.view(2, 2))


def test_overlapping_parts_of_one_tensor_are_not_taken_for_one():
    whole = torch.randn(3, 2)
    compiled = assert_like_eager(write_both, whole[:2], whole[:2])
    with pytest.raises(UnsupportedError, match="a and b were one tensor, called where they are two; pass a clone"):
        compiled(whole[:2], whole[1:])


def test_one_tensor_with_a_gradient_in_two_places_gets_the_gradient_of_both():
    def program(x):
        y = x * 2
        return inner(y, y), y

    def write(a, b, x):
        a.mul_(x)
        return a * b, b

    inner = jit(lambda a, b: write(a, b, 3.0))
    x = leaf(3)
    out, y = program(x)
    (out[0].sum() + y.sum()).backward()
    z = x.detach().clone().requires_grad_()
    w = z * 2
    theirs = write(w, w, 3.0)
    (theirs[0].sum() + w.sum()).backward()
    torch.testing.assert_close(out[0], theirs[0])
    torch.testing.assert_close(x.grad, z.grad)


def test_an_argument_and_its_detached_alias_are_two_where_one_is_written():
    def program(a, b):
        a.mul_(2)
        return a * b

    y = leaf(3) * 2
    with pytest.raises(UnsupportedError, match="share memory"):
        jit(program)(y, y.detach())


def test_one_tensor_in_two_places_that_nobody_writes_to_has_a_gradient_for_each():
    def program(x, a, b):
        counter = torch.zeros(2)
        counter.add_(1)
        return a * 3 + b.sin() * counter + x

    a = leaf(2)
    assert_like_eager(program, leaf(2), a, a)


def test_without_thunders_alias_key_other_arguments_are_refused():
    compiled = jit(write_both, skip_inplace_alias_updates=True)
    a = torch.randn(2, 2)
    compiled(a, a)
    with pytest.raises(UnsupportedError, match=r"called where they are two; .* leave out skip_inplace_alias_updates"):
        compiled(a, torch.randn(2, 2))


@pytest.mark.parametrize("product", [lambda r, y: r * y, lambda r, y: torch.where(y > 0, r, y)], ids=["two", "three"])
def test_the_result_of_a_write_and_what_was_written_to_are_one_operand(product):
    def program(x):
        y = x * 2
        r = y.mul_(3)
        return product(r, y) + product(y, y)

    assert_like_eager(program, leaf(3))
