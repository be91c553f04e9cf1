"""repeated_argument: one tensor in two slots of `autograd.Function.apply`."""
from __future__ import annotations

import thunder
import torch

from tests.compat.functions import FirstSlotOnly, Multiply, assert_like_eager


def test_both_slots_add_to_the_gradient():
    def program(x):
        return FirstSlotOnly.apply(x, x)

    assert_like_eager(thunder.jit(program), program, (3,))


def test_saved_tensors_of_both_slots_are_right():
    def program(x):
        return Multiply.apply(x.sin(), x) * Multiply.apply(x, x)

    assert_like_eager(thunder.jit(program), program, (3,))


def test_an_intermediate_may_be_repeated():
    def program(x, y):
        z = x * y
        return Multiply.apply(z, z) + z

    assert_like_eager(thunder.jit(program), program, (3,), (3,))


def test_a_module_parameter_may_be_repeated():
    class Square(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3))

        def forward(self, x):
            return x * Multiply.apply(self.weight, self.weight)

    module = Square()
    thunder.jit(module)(torch.ones(3)).sum().backward()
    torch.testing.assert_close(module.weight.grad, 2 * module.weight.detach())


def test_nothing_is_added_where_no_argument_repeats():
    traced = thunder.jit(lambda x, y: Multiply.apply(x, y))
    traced(torch.ones(2), torch.ones(2))
    assert "shallow_copy" not in str(thunder.last_traces(traced)[0])
