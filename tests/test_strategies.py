"""The oracle of the pass tests: it sees what a wrong pass does, and the generator makes what passes get wrong."""
from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import Phase as HypothesisPhase
from hypothesis import given, settings
from strategies import assert_same_meaning, aten, call, run, sample_cotangents, sample_inputs, traces

from jointtrace.ir.facts import mutated, uses
from jointtrace.ir.op import Op, Phase, Tag, Target, TensorType, Var
from jointtrace.ir.text import parse, print_op
from jointtrace.ir.trace import Trace

BEFORE = """
trace (%x: f32[2, 3], %w: f32[2, 3]) {
  fw:
    %r1: f32[2, 3] = aten.rand_like.default(%x)  # [random]
    %r2: f32[2, 3] = aten.rand_like.default(%x)  # [random]
    %a: f32[2, 3] = aten.sub.Tensor(%r1, %r2)
    %s1: f32[2, 3] = aten.sin.default(%a)
    %s2: f32[2, 3] = aten.sin.default(%a)
    %w1: f32[2, 3] = aten.copy_.default(%w, %a)  # [mutates] writes(%w)
  bw:
    %g1: f32[2, 3] = get_grad(%s1, 0)  # [get_grad]
    %g2: f32[2, 3] = get_grad(%s2, 1)  # [get_grad]
    %gx: f32[2, 3] = aten.mul.Tensor(%g1, %g2)
    %gw: f32[2, 3] = aten.mul.Tensor(%gx, %a)
  return (%s1, %s2, 7) grads (%gx, %gw)
}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sub.Tensor(%r1, %r2)", "sub.Tensor(%r1, %r1)"),
        ("return (%s1, %s2, 7)", "return (%s1, %s1, 7)"),
        ("return (%s1, %s2, 7)", "return (%s1, %s2, 8)"),
        ("mul.Tensor(%g1, %g2)", "mul.Tensor(%g1, %g1)"),
        ("grads (%gx, %gw)", "grads (%gx, None)"),
        ("grads (%gx, %gw)", "grads (%gw, %gx)"),
        ("copy_.default(%w, %a)", "copy_.default(%w, %s1)"),
        ("    %w1: f32[2, 3] = aten.copy_.default(%w, %a)  # [mutates] writes(%w)\n", ""),
    ],
)
def test_a_change_of_meaning_is_seen(old, new):
    assert old in BEFORE
    with pytest.raises(AssertionError):
        assert_same_meaning(parse(BEFORE), parse(BEFORE.replace(old, new)))


def test_dropping_a_dead_random_op_changes_nothing():
    dead = "    %dead: f32[2, 3] = aten.rand_like.default(%x)  # [random]\n"
    assert_same_meaning(parse(BEFORE.replace("  fw:\n", f"  fw:\n{dead}")), parse(BEFORE))


def test_running_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    trace = parse(BEFORE)
    run(trace, sample_inputs(trace), sample_cotangents(trace))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_region_runs_its_body():
    type_ = TensorType((2,), torch.float32)
    body = Trace(("a",), (call(aten.sin.default, Var("a"), out=Var("b")),), (Var("b"),), types={"a": type_, "b": type_})
    op = Op(Target("eager_0_fw"), (Var("x"),), out=(Var("y"),), body=body)
    trace = Trace(("x",), (op,), (Var("y"),), types={"x": type_, "y": type_})
    ((found,), _) = run(trace, [torch.ones(2)])
    assert torch.equal(found, torch.ones(2).sin())


@settings(max_examples=30)
@given(traces())
def test_a_trace_means_what_it_means(trace):
    assert_same_meaning(trace, trace)


@pytest.fixture(scope="module")
def many() -> list[Trace]:
    found: list[Trace] = []

    @settings(max_examples=300, database=None, derandomize=True, phases=[HypothesisPhase.generate])
    @given(traces())
    def collect(trace):
        found.append(trace)

    collect()
    return found


def _backward(trace: Trace) -> set[str]:
    return {name for op in trace.ops if op.phase is Phase.BW for name in op.outs}


def _tagged(trace: Trace, tag: Tag) -> list[Op]:
    return [op for op in trace.ops if tag in op.tags]


def _expressions(trace: Trace, phase: Phase) -> set[str]:
    return {print_op(op.replace(out=None, tags=frozenset(), source=None)) for op in trace.ops if op.phase is phase}


HAZARDS = {
    "repeated output": lambda t: len(set(t.output_names)) < len(t.output_names),
    "input among outputs": lambda t: set(t.output_names) & set(t.inputs),
    "constant output": lambda t: any(not isinstance(leaf, Var) for leaf in t.outputs),
    "dead op": lambda t: any(not any(uses(t)[name] for name in op.outs) for op in t.ops),
    "results used in part": lambda t: any({bool(uses(t)[n]) for n in op.outs} == {True, False} for op in t.ops),
    "one expression in both phases": lambda t: _expressions(t, Phase.FW) & _expressions(t, Phase.BW),
    "two draws alike": lambda t: len({op.ins for op in _tagged(t, Tag.RANDOM)}) < len(_tagged(t, Tag.RANDOM)),
    "write to an input": lambda t: mutated(t) & set(t.inputs),
    "write to a fresh value": lambda t: {n for op in t.ops for n in op.writes} - set(t.inputs),
    "checkpointed op": lambda t: _tagged(t, Tag.RECOMPUTE),
    "late cotangent": lambda t: any(
        Tag.GET_GRAD in op.tags and before.phase is Phase.BW for before, op in pairwise(t.ops)
    ),
    "unread cotangent": lambda t: any(not uses(t)[op.outs[0]] for op in _tagged(t, Tag.GET_GRAD)),
    "backward op of forward values alone": lambda t: any(
        op.phase is Phase.BW and Tag.GET_GRAD not in op.tags and not set(op.ins) & _backward(t) for op in t.ops
    ),
    "gradient": lambda t: any(t.grads),
    "two dtypes": lambda t: len({t.types[name].dtype for op in t.ops for name in op.outs}) > 1,
    "integer result": lambda t: any(t.types[name].dtype == torch.int64 for op in t.ops for name in op.outs),
    "write through a view": lambda t: any(
        set(op.writes) & {name for view in _tagged(t, Tag.VIEW) for name in view.outs} for op in t.ops),
}


@pytest.mark.parametrize("hazard", HAZARDS)
def test_generated_traces_hold_what_passes_get_wrong(many, hazard):
    assert sum(bool(HAZARDS[hazard](trace)) for trace in many) >= len(many) // 50


def test_writes_and_random_ops_can_be_left_out():
    found: list[Op] = []

    @settings(max_examples=50, database=None)
    @given(traces(writes=False, random=False))
    def collect(trace):
        found.extend(trace.ops)

    collect()
    assert found
    assert not any(op.tags & {Tag.MUTATES, Tag.RANDOM} for op in found)


def test_other_seeds_give_other_inputs():
    trace = parse(BEFORE)
    first, again, other = (sample_inputs(trace, seed) for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], sample_inputs(replace(trace, inputs=("w", "x")), 0)[1])
