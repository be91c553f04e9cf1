"""autograd_function_operator: custom autograd functions in a Dynamo graph given to thunder."""
from __future__ import annotations

import pytest
import torch
from thunder.dynamo import thunderfx

from tests.compat.functions import Multiply, ScaledProductAndSum, assert_like_eager


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def test_one_output_keeps_its_shape_and_gradient():
    def program(x, y):
        return Multiply.apply(x.sin(), y) * x

    assert_like_eager(thunderfx(program), program, (2, 3), (2, 3))


def test_two_outputs_and_a_number():
    def program(x, y):
        product, total = ScaledProductAndSum.apply(x, 3.0, y)
        return product - total.cos()

    assert_like_eager(thunderfx(program), program, (2, 3), (2, 3))


def test_it_runs_in_thunder_rather_than_in_a_fallback():
    compiled = thunderfx(lambda x, y: Multiply.apply(x, y))
    compiled(torch.ones(2, requires_grad=True), torch.ones(2))
    (info,) = compiled._backend.subgraph_infos
    assert info.thunder_compiled_fns
    assert not info.split_reasons
