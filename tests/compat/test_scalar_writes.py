"""What a program writes to a float64 argument without dimensions is there after the call."""
from __future__ import annotations

import pytest
import torch

import jointtrace  # noqa: F401  its backend


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_write_to_a_scalar_argument_is_seen_after_the_call(dtype, requires_grad):
    def program(count, x):
        count.mul_(2)
        return x * 3

    compiled = torch.compile(program, backend="jointtrace", fullgraph=True, options={"executors": ("eager",)})
    count, x = torch.ones((), dtype=dtype), torch.ones(2, requires_grad=requires_grad)
    for expected in (2, 4):
        torch.testing.assert_close(compiled(count, x), x * 3)
        assert count.item() == expected
