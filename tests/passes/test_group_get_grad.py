from __future__ import annotations

from hypothesis import given

from jointtrace.ir.op import Phase, Tag
from jointtrace.ir.text import parse
from jointtrace.passes.group_get_grad import group_get_grad
from tests.strategies import assert_same_meaning, traces

INTERLEAVED = """
trace (%x: f32[2, 3]) by=joint {
  fw:
    %a: f32[2, 3] = aten.sin.default(%x)
    %b: f32[2, 3] = aten.cos.default(%x)
  bw:
    %ga: f32[2, 3] = get_grad(%a, 0)  # [get_grad]
    %c: f32[2, 3] = aten.cos.default(%x)
    %da: f32[2, 3] = aten.mul.Tensor(%ga, %c)
    %gb: f32[2, 3] = get_grad(%b, 1)  # [get_grad]
    %db: f32[2, 3] = aten.mul.Tensor(%gb, %a)
    %dx: f32[2, 3] = aten.sub.Tensor(%da, %db)
  return (%a, %b) grads (%dx)
}
"""

GROUPED = """
trace (%x: f32[2, 3]) by=group_get_grad {
  fw:
    %a: f32[2, 3] = aten.sin.default(%x)
    %b: f32[2, 3] = aten.cos.default(%x)
  bw:
    %ga: f32[2, 3] = get_grad(%a, 0)  # [get_grad]
    %gb: f32[2, 3] = get_grad(%b, 1)  # [get_grad]
    %c: f32[2, 3] = aten.cos.default(%x)
    %da: f32[2, 3] = aten.mul.Tensor(%ga, %c)
    %db: f32[2, 3] = aten.mul.Tensor(%gb, %a)
    %dx: f32[2, 3] = aten.sub.Tensor(%da, %db)
  return (%a, %b) grads (%dx)
}
"""


def test_all_get_grads_stand_right_before_the_first_other_backward_op():
    assert str(group_get_grad(parse(INTERLEAVED))) == GROUPED.strip()


def test_a_grouped_trace_stays_as_it_is():
    grouped = parse(GROUPED)
    assert group_get_grad(grouped) == grouped


def test_a_backward_op_that_stood_before_the_first_get_grad_now_stands_after_it():
    trace = parse(INTERLEAVED)
    ga, c, *rest = trace.ops[2:]
    moved = group_get_grad(trace.rebuild([*trace.ops[:2], c, ga, *rest], by="joint"))
    assert str(moved) == GROUPED.strip()


@given(traces())
def test_grouping_keeps_the_meaning_and_the_ops(trace):
    text = str(trace)
    grouped = group_get_grad(trace)
    assert_same_meaning(trace, grouped)
    assert str(trace) == text
    assert sorted(map(repr, grouped.ops)) == sorted(map(repr, trace.ops))
    backward = [op for op in grouped.ops if op.phase is Phase.BW]
    cotangents = [op for op in backward if Tag.GET_GRAD in op.tags]
    assert backward[: len(cotangents)] == cotangents
    assert grouped.boundary == trace.boundary
