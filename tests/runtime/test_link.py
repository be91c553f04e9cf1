from __future__ import annotations

import gc
import weakref

import pytest
import torch

from jointtrace.errors import VerifyError
from jointtrace.executors.eager import EagerExecutor
from jointtrace.ir.op import Op, Target, TensorType, Var
from jointtrace.ir.trace import Trace
from jointtrace.runtime.counters import Counters
from jointtrace.runtime.link import link

FLOAT = TensorType((3,), torch.float32)


class Compiles(EagerExecutor):
    """An executor that remembers what it compiled."""

    name = "any"

    def __init__(self):
        self.compiled = []

    def compile(self, region):
        self.compiled.append(region.target.name)
        return super().compile(region)


def op(fn, *args, out):
    return Op(Target(fn.__name__, fn), args, out=Var(out))


def region(number, ops, inputs, output, type_=FLOAT):
    body = Trace(tuple(inputs), ops, (Var(output),), types={name: type_ for name in (*inputs, output)})
    return Op(Target(f"any_{number}_fw"), tuple(map(Var, inputs)), out=(Var(output),), body=body)


def linked(*regions, executor=None):
    trace = Trace(("x", "w"), regions, (Var(regions[-1].outs[0]),))
    return link(trace, [executor or Compiles()], Counters())


SIN_MUL = (op(torch.sin, Var("x"), out="a"), op(torch.mul, Var("a"), Var("w"), out="y"))
BLOCK = region(0, SIN_MUL, "xw", "y")
SAME = region(1, (op(torch.sin, Var("y"), out="q"), op(torch.mul, Var("q"), Var("w"), out="z")), "yw", "z")


def test_each_region_gets_a_callable():
    run = linked(BLOCK).ops[0].target.fn
    x, w = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(run(x, w), (torch.sin(x) * w,))


def test_other_ops_stay_as_they_are():
    sine = op(torch.sin, Var("x"), out="a")
    assert linked(sine, BLOCK).ops[0] is sine


def test_calls_are_counted_under_the_name_of_the_region():
    counters = Counters()
    trace = link(Trace(("x", "w"), (BLOCK, SAME), (Var("z"),)), [Compiles()], counters)
    trace.ops[1].target.fn(torch.ones(3), torch.ones(3))
    assert counters.calls() == {"any_0_fw": 0, "any_1_fw": 1}


def test_regions_of_one_structure_are_compiled_once():
    executor = Compiles()
    linked(BLOCK, SAME, executor=executor)
    assert executor.compiled == ["any_0_fw"]


def test_regions_of_one_structure_are_compiled_once_in_all_traces():
    executor = Compiles()
    first, second = linked(BLOCK, executor=executor), linked(SAME, executor=executor)
    assert executor.compiled == ["any_0_fw"]
    del first, second


@pytest.mark.parametrize("other", [
    region(1, SIN_MUL, "xw", "y", TensorType((4,), torch.float32)),
    region(1, SIN_MUL, "xw", "y", TensorType((3,), torch.float64)),
    region(1, SIN_MUL, "xw", "a"),
    region(1, (SIN_MUL[0], op(torch.mul, Var("w"), Var("a"), out="y")), "xw", "y"),
    region(1, (SIN_MUL[0], SIN_MUL[1].replace(target=Target("mul", torch.add))), "xw", "y"),
], ids=["shape", "dtype", "outputs", "order of operands", "function behind a name"])
def test_regions_of_another_structure_are_compiled_apart(other):
    executor = Compiles()
    linked(BLOCK, executor=executor)
    kept = linked(BLOCK, other, executor=executor)
    assert executor.compiled[-1] == "any_1_fw"
    del kept


def test_regions_around_other_constant_objects_are_compiled_apart():
    executor = Compiles()
    blocks = [region(i, (op(torch.mul, Var("x"), torch.full((3,), i), out="y"),), "x", "y") for i in range(2)]
    kept = linked(*blocks, executor=executor)
    assert executor.compiled == ["any_0_fw", "any_1_fw"]
    del kept


def test_code_that_no_trace_uses_any_more_is_dropped():
    executor = Compiles()
    trace = linked(BLOCK, executor=executor)
    ref = weakref.ref(trace.ops[0].target.fn)
    del trace
    gc.collect()
    assert ref() is None
    linked(BLOCK, executor=executor)
    assert executor.compiled == ["any_0_fw"] * 2


def test_a_region_of_an_executor_that_is_not_there_is_a_fault():
    with pytest.raises(VerifyError, match="any_0_fw is of executor 'any'"):
        link(Trace(("x", "w"), (BLOCK,), (Var("y"),)), [EagerExecutor()], Counters())
