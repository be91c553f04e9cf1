from __future__ import annotations

from hypothesis import given

from jointtrace.ir.op import Tag
from jointtrace.ir.text import parse
from jointtrace.passes.dce import dce
from tests.strategies import assert_same_meaning, traces


def targets_after_dce(text: str) -> list[str]:
    return [op.target.name for op in dce(parse(text)).ops]


def test_dead_ops_and_get_grads_are_dropped_in_both_phases():
    trace = parse(
        """
        trace (%x: f32[2], %w: f32[2]) {
          fw:
            %a: f32[2] = aten.sin.default(%x)
            %dead: f32[2] = aten.cos.default(%a)
            %deader: f32[2] = aten.neg.default(%dead)
            %b: f32[2] = aten.relu.default(%w)
          bw:
            %ga: f32[2] = get_grad(%a, 0)  # [get_grad]
            %gb: f32[2] = get_grad(%b, 1)  # [get_grad]
            %c: f32[2] = aten.cos.default(%x)
            %dx: f32[2] = aten.mul.Tensor(%ga, %c)
            %dw: f32[2] = aten.mul.Tensor(%gb, %w)
          return (%a, %b) grads (%dx, None)
        }
        """
    )
    assert str(dce(trace)) == (
        "trace (%x: f32[2], %w: f32[2]) by=dce {\n"
        "  fw:\n"
        "    %a: f32[2] = aten.sin.default(%x)\n"
        "    %b: f32[2] = aten.relu.default(%w)\n"
        "  bw:\n"
        "    %ga: f32[2] = get_grad(%a, 0)  # [get_grad]\n"
        "    %c: f32[2] = aten.cos.default(%x)\n"
        "    %dx: f32[2] = aten.mul.Tensor(%ga, %c)\n"
        "  return (%a, %b) grads (%dx, None)\n"
        "}"
    )


def test_a_write_to_an_input_stays_with_what_it_needs():
    assert targets_after_dce(
        """
        trace (%x: f32[2], %n: f32[2]) {
          fw:
            %m: f32[2] = aten.add.Tensor(%n, 1)
            %k: f32[2] = aten.copy_.default(%n, %m)  # [mutates] writes(%n)
            %y: f32[2] = aten.sin.default(%x)
          return (%y)
        }
        """
    ) == ["aten.add.Tensor", "aten.copy_.default", "aten.sin.default"]


def test_a_write_through_a_view_of_an_input_stays():
    assert targets_after_dce(
        """
        trace (%x: f32[2, 3]) {
          fw:
            %v: f32[3, 2] = aten.t.default(%x)  # [view]
            %k: f32[3, 2] = aten.add_.Tensor(%v, 1)  # [mutates] writes(%v)
          return (None)
        }
        """
    ) == ["aten.t.default", "aten.add_.Tensor"]


def test_a_write_whose_memory_is_returned_under_another_name_stays():
    assert targets_after_dce(
        """
        trace (%x: f32[2, 3]) {
          fw:
            %a: f32[2, 3] = aten.sin.default(%x)
            %v: f32[3, 2] = aten.t.default(%a)  # [view]
            %k: f32[2, 3] = aten.add_.Tensor(%a, 1)  # [mutates] writes(%a)
          return (%v)
        }
        """
    ) == ["aten.sin.default", "aten.t.default", "aten.add_.Tensor"]


def test_a_write_whose_memory_an_opaque_op_may_have_passed_on_stays():
    assert targets_after_dce(
        """
        trace (%x: f32[2, 3]) {
          fw:
            %a: f32[2, 3] = aten.sin.default(%x)
            %v: f32[2, 3] = custom.op(%a)  # [opaque]
            %k: f32[2, 3] = aten.add_.Tensor(%a, 1)  # [mutates] writes(%a)
            %y: f32[2, 3] = aten.neg.default(%v)
          return (%y)
        }
        """
    ) == ["aten.sin.default", "custom.op", "aten.add_.Tensor", "aten.neg.default"]


def test_a_write_whose_memory_a_region_may_have_passed_on_stays():
    assert targets_after_dce(
        """
        trace (%x: f32[2, 3]) {
          fw:
            %a: f32[2, 3] = aten.sin.default(%x)
            (%v: f32[3, 2],) = region(%a) with trace (%a: f32[2, 3]) {
              fw:
                %v: f32[3, 2] = aten.t.default(%a)  # [view]
              return (%v)
            }
            %k: f32[2, 3] = aten.add_.Tensor(%a, 1)  # [mutates] writes(%a)
          return (%v)
        }
        """
    ) == ["aten.sin.default", "region", "aten.add_.Tensor"]


def test_a_second_write_through_the_result_of_the_first_stays():
    assert targets_after_dce(
        """
        trace (%x: f32[2]) {
          fw:
            %a: f32[2] = aten.sin.default(%x)
            %k: f32[2] = aten.add_.Tensor(%a, 1)  # [mutates] writes(%a)
            %l: f32[2] = aten.add_.Tensor(%k, 1)  # [mutates] writes(%k)
          return (%a)
        }
        """
    ) == ["aten.sin.default", "aten.add_.Tensor", "aten.add_.Tensor"]


def test_a_write_to_memory_that_nothing_reads_afterwards_is_dropped():
    assert targets_after_dce(
        """
        trace (%x: f32[2]) {
          fw:
            %a: f32[2] = aten.sin.default(%x)
            %y: f32[2] = aten.neg.default(%a)
            %k: f32[2] = aten.add_.Tensor(%a, 1)  # [mutates] writes(%a)
          return (%y)
        }
        """
    ) == ["aten.sin.default", "aten.neg.default"]


def test_opaque_and_communicating_ops_stay_with_what_they_need():
    for tag in ("opaque", "collective", "wait"):
        text = f"""
        trace (%x: f32[2]) {{
          fw:
            %a: f32[2] = aten.sin.default(%x)
            %k: f32[2] = custom.op(%a)  # [{tag}]
          return (%x)
        }}
        """
        assert targets_after_dce(text) == ["aten.sin.default", "custom.op"], tag


def test_an_unused_random_op_is_dropped():
    assert targets_after_dce(
        """
        trace (%x: f32[2]) {
          fw:
            %a: f32[2] = aten.rand_like.default(%x)  # [random]
          return (%x)
        }
        """
    ) == []


def test_an_op_of_which_one_result_is_used_stays():
    assert targets_after_dce(
        """
        trace (%x: f32[2, 3]) {
          fw:
            (%a: f32[3], %i: i64[3]) = aten.max.dim(%x, 0)
          return (%i)
        }
        """
    ) == ["aten.max.dim"]


@given(traces())
def test_dce_keeps_the_meaning_and_leaves_nothing_dead(trace):
    text = str(trace)
    live = dce(trace)
    assert_same_meaning(trace, live)
    assert str(trace) == text
    read = {*live.output_names, *live.grad_names, *(name for op in live.ops for name in op.ins)}
    assert all(read.intersection(op.outs) for op in live.ops if Tag.MUTATES not in op.tags)
    assert dce(live) == live
