from __future__ import annotations

import torch

from jointtrace.executors.eager import EagerExecutor
from jointtrace.ir.op import Op, Tag, Target, Var
from jointtrace.ir.trace import Trace

EXECUTOR = EagerExecutor()
SINE = Op(Target("sin", torch.sin), (Var("x"),), out=Var("y"))


def test_it_is_always_available():
    assert EXECUTOR.unavailable() is None


def test_it_runs_any_op_and_makes_no_regions():
    assert EXECUTOR.can_run(SINE.replace(tags=frozenset({Tag.OPAQUE})), {})
    assert not EXECUTOR.fuses
    assert not EXECUTOR.wants([SINE, SINE])


def test_a_region_of_another_executor_can_be_run_with_it():
    region = Op(Target("any_0_fw"), (Var("x"),), out=(Var("y"),), body=Trace(("x",), (SINE,), (Var("y"),)))
    x = torch.randn(3)
    torch.testing.assert_close(EXECUTOR.compile(region)(x), (torch.sin(x),))
