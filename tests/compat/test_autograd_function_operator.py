"""autograd_function_operator: custom autograd functions in a Dynamo graph given to thunder."""
from __future__ import annotations

import pytest
import thunder
import torch
from thunder.dynamo import thunderfx

from jointtrace.compat.autograd_function_operator import TORCH
from jointtrace.compat.versions import torch_in
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


@pytest.mark.skipif(not torch_in(TORCH), reason=f"the operator has this contract on torch{TORCH}")
def test_an_error_of_the_forward_is_the_one_the_user_sees():
    def fails(x):
        raise ValueError("from the forward")

    graph = torch.fx.Graph()
    out = graph.call_function(fails, (graph.placeholder("x"),))
    graph.output(((out,), ()))
    forward = torch.fx.GraphModule({}, graph)
    operator = torch.ops.higher_order.autograd_function_apply

    def program(x):
        return operator(forward, forward, x, non_differentiable_idx=[], saved_for_backward_idx=[])[0]

    with pytest.raises(ValueError, match="from the forward"):
        thunder.jit(program)(torch.ones(2))
