from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jointtrace import pipeline
from jointtrace.errors import UnsupportedError, VerifyError
from jointtrace.executors.base import Compiled as CompiledRegion
from jointtrace.executors.eager import EagerExecutor
from jointtrace.ir.op import Op, Tag, Type
from jointtrace.ir.text import parse
from jointtrace.ir.trace import Trace
from jointtrace.options import SWITCHABLE_PASSES, Options
from jointtrace.pipeline import PASSES, Compiled, Stage
from tests.strategies import run, sample_cotangents, sample_inputs, traces


class Elementwise:
    """An executor that claims all but compute-bound ops; its regions are run op by op by the tests."""

    name = "elementwise"
    fuses = True

    def unavailable(self) -> str | None:
        return None

    def can_run(self, op: Op, types: Mapping[str, Type]) -> bool:
        return Tag.COMPUTE_BOUND not in op.tags

    def wants(self, ops: Sequence[Op]) -> bool:
        return len(ops) > 1

    def compile(self, region: Op) -> CompiledRegion:
        return EagerExecutor().compile(region)


BLOCK = """
trace (%x: f32[3, 3], %w: f32[3, 3]) by=build_joint {
  fw:
    %a: f32[3, 3] = aten.mm.default(%x, %w)  # [compute_bound]
    %b: f32[3, 3] = aten.sin.default(%a)
    %y: f32[3, 3] = aten.mul.Tensor(%b, %x)
    %z: f32[3, 3] = aten.neg.default(%b)
  bw:
    %gy: f32[3, 3] = get_grad(%y, 0)  # [get_grad]
    %db: f32[3, 3] = aten.mul.Tensor(%gy, %x)
    %gz: f32[3, 3] = get_grad(%z, 1)  # [get_grad]
    %nz: f32[3, 3] = aten.neg.default(%gz)
    %sb: f32[3, 3] = aten.add.Tensor(%db, %nz)
    %c: f32[3, 3] = aten.cos.default(%a)
    %da: f32[3, 3] = aten.mul.Tensor(%sb, %c)
    %bb: f32[3, 3] = aten.mul.Tensor(%da, %b)
    %xt: f32[3, 3] = aten.t.default(%x)  # [view]
    %dw: f32[3, 3] = aten.mm.default(%xt, %bb)  # [compute_bound]
  return (%y, %z) grads (None, %dw)
}
"""


def compiled(text: str = BLOCK, **options) -> Compiled:
    return pipeline.run(parse(text), Options(**options), (Elementwise(),))


def names(result: Compiled) -> list[str]:
    return [stage.name for stage in result.stages]


def test_the_stages_are_the_passes_in_order_then_both_halves():
    assert names(compiled()) == [
        "joint", "group_get_grad", "cse", "dce", "seed_random", "recompute", "dce", "fuse",
        "split_forward", "split_backward", "dce_forward", "dce_backward",
    ]  # fmt: skip


def test_an_early_split_lets_executors_claim_each_half():
    assert names(compiled(late_split=False)) == [
        "joint", "group_get_grad", "cse", "dce", "seed_random", "recompute", "dce",
        "split_forward", "split_backward", "dce_forward", "dce_backward", "fuse_forward", "fuse_backward",
    ]  # fmt: skip


def test_each_pass_can_be_switched_off_by_name():
    for name in SWITCHABLE_PASSES:
        assert not [stage for stage in names(compiled(disable=(name,))) if stage.startswith(name)], name


def test_every_pass_is_switchable():
    assert {name for name, _ in PASSES} == set(SWITCHABLE_PASSES)


def test_without_recompute_all_that_the_backward_reads_is_saved():
    assert compiled().halves.saved == ("x", "a")
    assert compiled(disable=("recompute",)).halves.saved == ("x", "a", "b")


def test_without_fuse_only_views_are_computed_again():
    assert compiled(disable=("fuse",)).halves.saved == ("x", "a", "b")
    text = """
    trace (%x: f32[3, 3]) {
      fw:
        %a: f32[3, 3] = aten.mm.default(%x, %x)  # [compute_bound]
        %v: f32[3, 3] = aten.t.default(%a)  # [view]
        %y: f32[3, 3] = aten.neg.default(%v)
      bw:
        %g: f32[3, 3] = get_grad(%y, 0)  # [get_grad]
        %b: f32[3, 3] = aten.mul.Tensor(%g, %a)
        %dx: f32[3, 3] = aten.mul.Tensor(%b, %v)
      return (%y) grads (%dx)
    }
    """
    assert compiled(text, disable=("fuse",)).halves.saved == ("a",)


def test_ops_that_an_executor_which_does_not_fuse_claims_first_are_not_cheap():
    result = pipeline.run(parse(BLOCK), Options(), (EagerExecutor(), Elementwise()))
    assert result.halves.saved == ("x", "a", "b")


def test_the_backward_is_one_region_between_get_grads_and_matrix_product():
    backward = compiled().halves.backward
    assert backward is not None
    assert [op.body is not None for op in backward.ops] == [True, False]
    assert backward.inputs == ("x", "a", "gy", "gz")


def test_without_grouping_a_get_grad_stands_between_the_ops():
    result = compiled(disable=("group_get_grad", "fuse"))
    joint = result.stages[-5].trace
    backward = [Tag.GET_GRAD in op.tags for op in joint.ops[joint.boundary :]]
    assert backward[:3] == [True, False, True]


def test_the_forward_half_does_not_hold_what_only_the_backward_read():
    text = """
    trace (%x: f32[3]) {
      fw:
        %a: f32[3] = aten.sin.default(%x)
        %c: f32[3] = aten.cos.default(%x)
      bw:
        %g: f32[3] = get_grad(%a, 0)  # [get_grad]
        %dx: f32[3] = aten.mul.Tensor(%g, %c)
      return (%a) grads (%dx)
    }
    """
    result = compiled(text)
    assert [op.target.name for op in result.halves.forward.ops] == ["aten.sin.default"]
    assert result.halves.saved == ("x",)


def test_dependence_on_cotangents_is_known_before_regions_blur_it():
    text = """
    trace (%x: f32[3], %w: f32[3]) {
      fw:
        %a: f32[3] = aten.sin.default(%x)
        %b: f32[3] = aten.sin.default(%w)
      bw:
        %g: f32[3] = get_grad(%a, 0)  # [get_grad]
        %h: f32[3] = get_grad(%b, 1)  # [get_grad]
        %dx: f32[3] = aten.mul.Tensor(%g, %x)
        %dw: f32[3] = aten.mul.Tensor(%h, %w)
      return (%a, %b) grads (%dx, %dw)
    }
    """
    result = compiled(text)
    assert [len(op.outs) for op in result.halves.backward.ops] == [2]
    assert result.depends == (frozenset({0}), frozenset({1}))


def test_a_trace_without_gradients_has_a_forward_only():
    result = compiled(BLOCK.replace("grads (None, %dw)", "grads (None, None)"))
    assert result.halves.backward is None
    assert names(result)[-2:] == ["split_forward", "dce_forward"]
    assert result.depends == (frozenset(), frozenset())


def test_stages_hold_what_each_pass_made_and_took():
    stages = compiled().stages
    assert [stage.ops for stage in stages] == [len(stage.trace.ops) for stage in stages]
    assert all(stage.seconds >= 0 for stage in stages)
    assert [stage.trace.by for stage in stages[1 : 1 + len(PASSES)]] == [name for name, _ in PASSES]


def test_a_pass_that_breaks_the_trace_is_named_and_its_work_was_recorded(monkeypatch):
    def lose_the_first_op(trace: Trace, *_: object) -> Trace:
        return trace.rebuild(trace.ops[1:], by="cse")

    passes = tuple((name, lose_the_first_op if name == "cse" else step) for name, step in PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)
    seen: list[Stage] = []
    with pytest.raises(VerifyError, match=r"^after cse: op 0 "):
        pipeline.run(parse(BLOCK), Options(), (Elementwise(),), on_stage=seen.append)
    assert [stage.name for stage in seen] == ["joint", "group_get_grad", "cse"]


def test_stages_are_handed_over_as_they_come():
    seen: list[Stage] = []
    result = pipeline.run(parse(BLOCK), Options(), (Elementwise(),), on_stage=seen.append)
    assert tuple(seen) == result.stages


def test_a_value_saved_but_overwritten_is_the_users_fault_not_ours():
    text = """
    trace (%x: f32[3], %w: f32[3]) {
      fw:
        %y: f32[3] = aten.mul.Tensor(%x, %w)
        %k: f32[3] = aten.add_.Tensor(%x, 1)  # [mutates] writes(%x) model.py:7
      bw:
        %g: f32[3] = get_grad(%y, 0)  # [get_grad]
        %dw: f32[3] = aten.mul.Tensor(%g, %x)
      return (%y) grads (None, %dw)
    }
    """
    for disable in ((), ("recompute",)):
        with pytest.raises(UnsupportedError, match=r"overwritten in place: aten\.add_\.Tensor at model.py:7"):
            compiled(text, disable=disable)


@settings(deadline=None)
@given(traces(), st.sets(st.sampled_from(SWITCHABLE_PASSES)), st.booleans())
def test_the_halves_compute_what_the_joint_trace_computes(trace, disable, late_split):
    options = Options(disable=tuple(sorted(disable)), late_split=late_split)
    result = pipeline.run(trace, options, (Elementwise(),))
    halves = result.halves
    # what is drawn from seeds are other numbers
    trace = next((stage.trace for stage in result.stages if stage.name == "seed_random"), trace)
    inputs, new_inputs = sample_inputs(trace), sample_inputs(trace)
    cotangents = sample_cotangents(trace)
    outputs, grads = run(trace, inputs, cotangents)
    results, _ = run(halves.forward, new_inputs)
    new_outputs, kept = results[: len(outputs)], results[len(outputs) :]
    new_grads = [None] * len(grads)
    if halves.backward is not None:
        cotangents = sample_cotangents(trace)  # the backward may write to them
        present = [g for g, name in zip(cotangents, halves.cotangents, strict=True) if name is not None]
        new_grads, _ = run(halves.backward, [*kept, *present])
        torch.testing.assert_close(new_inputs, inputs, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(new_outputs, outputs, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(new_grads, grads, rtol=0, atol=0, equal_nan=True)
