"""lazy_graph_module: thunder gets graph modules whose code is written."""
from __future__ import annotations

import pytest
import torch
from thunder.dynamo import thunderfx

from tests.compat.functions import assert_like_eager


def test_a_dynamo_graph_runs_through_thunder():
    torch._dynamo.reset()

    def program(x, y):
        return torch.sin(x) @ y

    compiled = thunderfx(program)
    assert_like_eager(compiled, program, (2, 3), (3, 2))
    assert compiled._backend.subgraph_infos[0].thunder_compiled_fns


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Inductor, on thunder's split graph
def test_a_split_graph_runs_through_thunder():
    torch._dynamo.reset()

    def program(x):
        return torch.sinc(torch.sin(x)) + torch.cos(x)

    assert_like_eager(thunderfx(program), program, (2, 3))
