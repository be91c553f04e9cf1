from __future__ import annotations

import time
from textwrap import dedent

import pytest
import torch
from hypothesis import given

from jointtrace.errors import VerifyError
from jointtrace.ir.op import Phase, Tag, Var
from jointtrace.ir.text import parse
from jointtrace.ir.trace import Trace
from jointtrace.ir.verify import verify
from jointtrace.passes.recompute import recompute
from jointtrace.runtime.split import Halves, depends, split
from tests.strategies import aten, call, run, sample_cotangents, sample_inputs, traces

JOINT = """
trace (%x: f32[2], %w: f32[2]) by=joint notes={'table': 'none'} {
  fw:
    %a: f32[2] = aten.mul.Tensor(%x, %w)
    %y: f32[2] = aten.sin.default(%a)
    %z: f32[2] = aten.neg.default(%x)
  bw:
    %gy: f32[2] = get_grad(%y, 0)  # [get_grad]
    %c: f32[2] = aten.cos.default(%a)
    %da: f32[2] = aten.mul.Tensor(%gy, %c)
    %gz: f32[2] = get_grad(%z, 2)  # [get_grad]
    %dx: f32[2] = aten.sub.Tensor(%da, %gz)
  return (%y, 3, %z) grads (%dx, %da)
}
"""


def test_the_halves_hand_over_saved_values_and_cotangents():
    halves = split(parse(JOINT))
    assert halves.saved == ("a",)
    assert halves.cotangents == ("gy", None, "gz")
    assert str(halves.forward) == dedent(
        """
        trace (%x: f32[2], %w: f32[2]) by=split notes={'table': 'none'} {
          fw:
            %a: f32[2] = aten.mul.Tensor(%x, %w)
            %y: f32[2] = aten.sin.default(%a)
            %z: f32[2] = aten.neg.default(%x)
          return (%y, 3, %z, %a)
        }
        """
    ).strip()
    assert str(halves.backward) == dedent(
        """
        trace (%a: f32[2], %gy: f32[2], %gz: f32[2]) by=split notes={'table': 'none'} {
          bw:
            %c: f32[2] = aten.cos.default(%a)
            %da: f32[2] = aten.mul.Tensor(%gy, %c)
            %dx: f32[2] = aten.sub.Tensor(%da, %gz)
          return (%dx, %da)
        }
        """
    ).strip()


def test_there_is_no_backward_where_nothing_has_a_gradient():
    halves = split(parse(JOINT.replace("grads (%dx, %da)", "grads (None, None)")))
    assert halves.backward is None
    assert (halves.saved, halves.cotangents) == ((), (None, None, None))
    assert halves.forward.outputs == (Var("y"), 3, Var("z"))


def test_a_gradient_may_be_a_cotangent_an_input_or_a_forward_value():
    text = """
    trace (%x: f32[2], %w: f32[2], %v: f32[2]) {
      fw:
        %a: f32[2] = aten.sin.default(%x)
        %y: f32[2] = aten.neg.default(%a)
      bw:
        %g: f32[2] = get_grad(%y, 0)  # [get_grad]
      return (%y) grads (%g, %w, %a)
    }
    """
    halves = split(parse(text))
    assert halves.saved == ("w", "a")
    assert halves.backward is not None
    assert halves.backward.inputs == ("w", "a", "g")
    assert halves.backward.outputs == (Var("g"), Var("w"), Var("a"))


def test_a_value_returned_twice_has_a_cotangent_for_each_position():
    text = """
    trace (%x: f32[2]) {
      fw:
        %y: f32[2] = aten.sin.default(%x)
      bw:
        %h: f32[2] = get_grad(%y, 1)  # [get_grad]
        %g: f32[2] = get_grad(%y, 0)  # [get_grad]
        %s: f32[2] = aten.add.Tensor(%g, %h)
        %c: f32[2] = aten.cos.default(%x)
        %dx: f32[2] = aten.mul.Tensor(%s, %c)
      return (%y, %y) grads (%dx)
    }
    """
    halves = split(parse(text))
    assert halves.cotangents == ("g", "h")
    assert halves.backward is not None
    assert halves.backward.inputs == ("x", "g", "h")


def test_two_cotangents_of_one_position_are_refused():
    text = JOINT.replace("get_grad(%z, 2)", "get_grad(%y, 0)")
    with pytest.raises(VerifyError, match="output 0 has two get_grad ops: %gy and %gz"):
        split(parse(text))


def test_gradients_depend_on_the_cotangents_they_are_computed_from():
    assert depends(parse(JOINT)) == (frozenset({0, 2}), frozenset({0}))


def test_a_gradient_that_is_none_or_computed_from_forward_values_depends_on_no_cotangent():
    assert depends(parse(JOINT.replace("grads (%dx, %da)", "grads (None, %c)"))) == (frozenset(), frozenset())


def test_a_gradient_depends_on_what_was_written_to_its_memory():
    text = """
    trace (%x: f32[2, 3], %w: f32[3, 2]) {
      fw:
        %y: f32[2, 3] = aten.sin.default(%x)
        %z: f32[2, 3] = aten.cos.default(%x)
      bw:
        %g: f32[2, 3] = get_grad(%y, 0)  # [get_grad]
        %h: f32[2, 3] = get_grad(%z, 1)  # [get_grad]
        %a: f32[2, 3] = aten.neg.default(%h)
        %v: f32[3, 2] = aten.t.default(%a)  # [view]
        %b: f32[2, 3] = aten.add_.Tensor(%a, %g)  # [mutates] writes(%a)
      return (%y, %z) grads (%b, %v)
    }
    """
    assert depends(parse(text)) == (frozenset({0, 1}), frozenset({0, 1}))


def test_a_gradient_depends_on_every_write_to_its_memory():
    text = """
    trace (%x: f32[2], %w: f32[2]) {
      fw:
        %y: f32[2] = aten.sin.default(%x)
        %z: f32[2] = aten.cos.default(%x)
      bw:
        %g: f32[2] = get_grad(%y, 0)  # [get_grad]
        %h: f32[2] = get_grad(%z, 1)  # [get_grad]
        %a: f32[2] = aten.neg.default(%w)
        %u: f32[1] = aten.slice.Tensor(%a, 0, 0, 1)  # [view]
        %v: f32[1] = aten.slice.Tensor(%a, 0, 1, 2)  # [view]
        %b: f32[1] = aten.add_.Tensor(%u, %g)  # [mutates] writes(%u)
        %c: f32[1] = aten.add_.Tensor(%v, %h)  # [mutates] writes(%v)
      return (%y, %z) grads (%a, None)
    }
    """
    assert depends(parse(text)) == (frozenset({0, 1}), frozenset())


def test_a_gradient_depends_on_writes_to_memory_that_an_opaque_op_may_have_passed_on():
    text = """
    trace (%x: f32[2]) {
      fw:
        %y: f32[2] = aten.sin.default(%x)
      bw:
        %g: f32[2] = get_grad(%y, 0)  # [get_grad]
        %a: f32[2] = aten.neg.default(%x)
        %o: f32[2] = custom.op(%a)  # [opaque]
        %b: f32[2] = aten.add_.Tensor(%a, %g)  # [mutates] writes(%a)
        %dx: f32[2] = aten.neg.default(%o)
      return (%y) grads (%dx)
    }
    """
    assert depends(parse(text)) == (frozenset({0}),)


def run_halves(halves: Halves, trace: Trace):
    inputs = sample_inputs(trace)
    cotangents = sample_cotangents(trace)
    results, _ = run(halves.forward, inputs)
    outputs, kept = results[: len(trace.outputs)], results[len(trace.outputs) :]
    if halves.backward is None:
        return outputs, [None] * len(trace.grads), inputs
    present = [g for g, name in zip(cotangents, halves.cotangents, strict=True) if name is not None]
    grads, _ = run(halves.backward, [*kept, *present])
    return outputs, grads, inputs


@given(traces())
def test_one_half_after_the_other_computes_what_the_joint_trace_computes(trace):
    text = str(trace)
    halves = split(trace)
    assert str(trace) == text
    verify(halves.forward)
    assert all(op.phase is Phase.FW for op in halves.forward.ops)
    if halves.backward is not None:
        verify(halves.backward)
        assert all(op.phase is Phase.BW and Tag.GET_GRAD not in op.tags for op in halves.backward.ops)
    inputs = sample_inputs(trace)
    outputs, grads = run(trace, inputs, sample_cotangents(trace))
    if halves.backward is None:  # then what the backward's ops write is not written
        joint_forward = trace.rebuild(trace.ops[: trace.boundary], by="", grads=())
        inputs = sample_inputs(trace)
        outputs, _ = run(joint_forward, inputs)
    torch.testing.assert_close(run_halves(halves, trace), (outputs, grads, inputs), rtol=0, atol=0, equal_nan=True)


@given(traces())
def test_a_gradient_changes_only_with_the_cotangents_it_depends_on(trace):
    _, grads = run(trace, sample_inputs(trace), sample_cotangents(trace))
    for position in range(len(trace.outputs)):
        cotangents = sample_cotangents(trace)
        if cotangents[position] is None:
            continue
        cotangents[position] = sample_cotangents(trace, seed=1)[position]
        _, others = run(trace, sample_inputs(trace), cotangents)
        for positions, grad, other in zip(depends(trace), grads, others, strict=True):
            if position not in positions:
                torch.testing.assert_close(other, grad, rtol=0, atol=0, equal_nan=True)


@given(traces())
def test_the_backward_is_handed_exactly_what_it_reads(trace):
    backward = split(recompute(trace, fused=lambda op: Tag.COMPUTE_BOUND not in op.tags)).backward
    if backward is not None:
        read = {*backward.output_names, *(name for op in backward.ops for name in op.ins)}
        cotangents = {op.outs[0] for op in trace.ops if Tag.GET_GRAD in op.tags}
        assert set(backward.inputs) - cotangents <= read
        assert len(set(backward.inputs)) == len(backward.inputs)


def test_splitting_5000_ops_with_500_outputs_stays_quick():
    ops, backward = [], []
    for i in range(2500):
        ops.append(call(aten.sin.default, Var(f"v{i - 1}" if i else "x"), out=Var(f"v{i}")))
    for i in range(2500):
        read = f"d{i - 1}" if i else "x"
        backward.append(call(aten.mul.Tensor, Var(read), Var(f"v{i}"), out=Var(f"d{i}"), phase=Phase.BW))
    trace = Trace(("x",), (*ops, *backward), tuple(Var(f"v{i}") for i in range(500)), (Var("d2499"),), {})
    start = time.process_time()
    split(trace)
    depends(trace)
    assert time.process_time() - start < 1.0
