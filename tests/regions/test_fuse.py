from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from hypothesis import given

from jointtrace.executors.base import gains
from jointtrace.executors.eager import EagerExecutor
from jointtrace.executors.torch_compile import TorchCompileExecutor
from jointtrace.ir.op import NEVER_FUSED, Op, Phase, Tag, Target, TensorType, Var
from jointtrace.ir.text import canonical, parse
from jointtrace.ir.trace import Trace
from jointtrace.ir.verify import verify
from jointtrace.regions.fuse import executor_of, fuse
from tests.strategies import assert_same_meaning, traces

COMPILER = TorchCompileExecutor()


class Claims(EagerExecutor):
    """A fusing executor that claims the ops of some targets."""

    fuses = True

    def __init__(self, name: str, *targets: str) -> None:
        self.name = name
        self.targets = targets

    def can_run(self, op: Op, types: object) -> bool:
        return op.target.name in self.targets

    def wants(self, ops: Sequence[Op]) -> bool:
        return gains(ops)


ANY = Claims("any", *"abcdefgh", "aten.sin.default", "aten.neg.default", "aten.mul.Tensor", "aten.t.default")


def trace_of(text: str, inputs: str = "%x: f32[2, 2], %w: f32[2, 2]") -> Trace:
    """A trace from ops written as `out = target(ins)  # tags`, `--` before the backward; all values are 2 x 2."""
    lines, phase = [], "fw:"
    for line in filter(None, map(str.strip, text.splitlines())):
        if line == "--":
            phase = "bw:"
            lines.append(phase)
            continue
        lines += [phase] if not lines else []
        lines.append(line)
    body, result = lines[:-1], lines[-1]
    return parse("\n".join([f"trace ({inputs}) {{", *body, result, "}"]))


def shape(trace: Trace) -> list[str]:
    """The ops of a trace, a region as the targets in it."""
    return [op.target.name if op.body is None else "+".join(o.target.name for o in op.body.ops) for op in trace.ops]


def test_the_ops_of_each_side_become_one_region():
    trace = trace_of("""
        %a: f32[2, 2] = aten.sin.default(%x)
        %b: f32[2, 2] = aten.mul.Tensor(%a, %w)
        --
        %g: f32[2, 2] = get_grad(%b, 0)  # [get_grad]
        %c: f32[2, 2] = aten.neg.default(%a)
        %d: f32[2, 2] = aten.mul.Tensor(%g, %c)
        return (%b) grads (%d, None)
    """)
    assert str(fuse(trace, [ANY])) == """\
trace (%x: f32[2, 2], %w: f32[2, 2]) by=fuse {
  fw:
    (%a: f32[2, 2], %b: f32[2, 2]) = any_0_fw(%x, %w) with trace (%x: f32[2, 2], %w: f32[2, 2]) by=fuse {
      fw:
        %a: f32[2, 2] = aten.sin.default(%x)
        %b: f32[2, 2] = aten.mul.Tensor(%a, %w)
      return (%a, %b)
    }
  bw:
    %g: f32[2, 2] = get_grad(%b, 0)  # [get_grad]
    (%d: f32[2, 2],) = any_1_bw(%a, %g) with trace (%a: f32[2, 2], %g: f32[2, 2]) by=fuse {
      bw:
        %c: f32[2, 2] = aten.neg.default(%a)
        %d: f32[2, 2] = aten.mul.Tensor(%g, %c)
      return (%d)
    }
  return (%b) grads (%d, None)
}"""


def test_an_op_that_runs_by_itself_and_needs_inputs_alone_separates_nothing():
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)
        %o: f32[2, 2] = other(%w)
        %b: f32[2, 2] = b(%a, %o)
        return (%b)
    """)
    assert shape(fuse(trace, [ANY])) == ["other", "a+b"]


def test_an_op_between_two_that_are_claimed_separates_them():
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)
        %b: f32[2, 2] = b(%a)
        %o: f32[2, 2] = other(%b)
        %c: f32[2, 2] = c(%o, %a)
        %d: f32[2, 2] = d(%c)
        return (%d)
    """)
    assert shape(fuse(trace, [ANY])) == ["a+b", "other", "c+d"]


def test_a_region_is_never_left_and_entered_again():
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)
        %b: f32[2, 2] = b(%x)
        %o: f32[2, 2] = other(%a)
        %c: f32[2, 2] = c(%b)
        %d: f32[2, 2] = d(%o, %c)
        %e: f32[2, 2] = e(%d)
        return (%e)
    """)
    assert shape(fuse(trace, [ANY])) == ["a+b+c", "other", "d+e"]


def test_a_get_grad_is_never_in_a_region():
    greedy = Claims("greedy", "get_grad", "a", "b")
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)
        --
        %g: f32[2, 2] = get_grad(%a, 0)  # [get_grad]
        %b: f32[2, 2] = b(%g)
        %c: f32[2, 2] = b(%b)
        return (%a) grads (%c, None)
    """)
    assert shape(fuse(trace, [greedy])) == ["a", "get_grad", "b+b"]


def test_an_op_with_a_tag_that_forbids_it_is_never_in_a_region():
    greedy = Claims("greedy", "a", "b")
    for tag in sorted(NEVER_FUSED - {Tag.GET_GRAD, Tag.MUTATES}, key=lambda tag: tag.value):
        trace = trace_of(f"""
            %a: f32[2, 2] = a(%x)
            %b: f32[2, 2] = b(%a)  # [{tag.value}]
            return (%b)
        """)
        assert shape(fuse(trace, [greedy])) == ["a", "b"], tag


def test_no_region_reaches_over_a_collective_or_a_wait():
    trace = trace_of("""
        %s: f32[2, 2] = gather(%w)  # [collective]
        %a: f32[2, 2] = a(%x)
        %b: f32[2, 2] = b(%a)
        %t: f32[2, 2] = wait(%s)  # [wait]
        %c: f32[2, 2] = c(%b)
        %d: f32[2, 2] = d(%c, %t)
        return (%d)
    """)
    assert shape(fuse(trace, [ANY])) == ["gather", "a+b", "wait", "c+d"]


def test_a_region_has_one_device():
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)
        %b: f32[2, 2] = b(%a)
        %c: f32[2, 2] cuda:0 = c(%w)
        %d: f32[2, 2] cuda:0 = d(%c)
        %e: f32[2, 2] = e(%d, %b)
        return (%b, %d, %e)
    """, "%x: f32[2, 2], %w: f32[2, 2] cuda:0")
    assert shape(fuse(trace, [ANY])) == ["a+b", "c+d", "e"]


def test_an_op_on_two_devices_runs_by_itself():
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)
        %b: f32[2, 2] cuda:0 = b(%w)
        %c: f32[2, 2] = c(%a, %b)
        %d: f32[2, 2] = d(%c)
        %e: f32[2, 2] cuda:0 = e(%c)
        return (%d, %e)
    """, "%x: f32[2, 2], %w: f32[2, 2] cuda:0")
    assert shape(fuse(trace, [ANY])) == ["a", "b", "c", "d", "e"]


def test_the_first_executor_that_can_run_an_op_gets_it():
    first, second = Claims("first", "a", "b"), Claims("second", "a", "b", "c", "d")
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)
        %b: f32[2, 2] = b(%a)
        %c: f32[2, 2] = c(%b)
        %d: f32[2, 2] = d(%c)
        return (%d)
    """)
    fused = fuse(trace, [first, second])
    assert [(executor_of(op), len(op.body.ops)) for op in fused.ops] == [("first", 2), ("second", 2)]
    assert shape(fuse(trace, [EagerExecutor(), second])) == ["a", "b", "c", "d"]


def test_a_single_op_stays_as_it_is_with_or_without_views():
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)
        %b: f32[2, 2] = b(%a)  # [view]
        return (%b)
    """)
    assert fuse(trace, [ANY]).ops == trace.ops


def test_views_alone_stay_as_they_are():
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)  # [view]
        %b: f32[2, 2] = b(%a)  # [view]
        return (%b)
    """)
    assert fuse(trace, [ANY]).ops == trace.ops


def test_random_ops_may_be_in_a_region_which_is_then_random():
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)  # [random]
        %b: f32[2, 2] = b(%a)  # [compute_bound]
        return (%b)
    """)
    (region,) = fuse(trace, [ANY]).ops
    assert region.tags == {Tag.RANDOM, Tag.COMPUTE_BOUND}


def test_random_ops_keep_their_order():
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)  # [random]
        %o: f32[2, 2] = other(%w)  # [random]
        %b: f32[2, 2] = b(%x)  # [random]
        %c: f32[2, 2] = c(%b)
        return (%a, %o, %c)
    """)
    assert shape(fuse(trace, [ANY])) == ["a", "other", "b+c"]


def test_a_value_is_read_before_it_is_overwritten():
    trace = trace_of("""
        %v: f32[2, 2] = a(%x)  # [view]
        %n: f32[2, 2] = copy(%x, %w)  # [mutates] writes(%x)
        %b: f32[2, 2] = b(%v)
        %c: f32[2, 2] = c(%b)
        return (%c, %n)
    """)
    assert shape(fuse(trace, [ANY])) == ["a", "copy", "b+c"]
    trace = trace_of("""
        %b: f32[2, 2] = b(%x)
        %n: f32[2, 2] = copy(%x, %w)  # [mutates] writes(%x)
        %c: f32[2, 2] = c(%b)
        return (%c, %n)
    """)
    assert shape(fuse(trace, [ANY])) == ["b+c", "copy"]


def test_what_only_a_region_reads_is_no_output_of_it():
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)
        %b: f32[2, 2] = b(%a, %w)
        return (%b)
    """)
    (region,) = fuse(trace, [ANY]).ops
    assert (region.ins, region.outs) == (("x", "w"), ("b",))


def test_a_gradient_made_in_a_region_is_an_output_of_it():
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)
        --
        %g: f32[2, 2] = get_grad(%a, 0)  # [get_grad]
        %b: f32[2, 2] = b(%g)
        %c: f32[2, 2] = c(%b)
        return (%a) grads (%b, %c)
    """)
    assert fuse(trace, [ANY]).ops[-1].outs == ("b", "c")


def test_repeated_blocks_give_regions_of_one_structure():
    trace = trace_of("""
        %a: f32[2, 2] = a(%x)
        %b: f32[2, 2] = b(%a)
        %o: f32[2, 2] = other(%b)
        %c: f32[2, 2] = a(%o)
        %d: f32[2, 2] = b(%c)
        return (%d)
    """)
    first, _, second = fuse(trace, [ANY]).ops
    assert canonical(first.body) == canonical(second.body)


@given(traces())
def test_the_meaning_stays(trace):
    fused = fuse(trace, [COMPILER])
    verify(fused)
    assert_same_meaning(trace, fused)


@given(traces())
def test_the_meaning_stays_with_two_executors_and_ops_that_none_claims(trace):
    fused = fuse(trace, [Claims("one", "aten.sin.default", "aten.add.Tensor", "aten.mm.default"),
                         Claims("two", "aten.mul.Tensor", "aten.reshape.default", "aten.rand_like.default")])
    verify(fused)
    assert_same_meaning(trace, fused)


@given(traces(writes=False, random=False))
def test_no_op_is_lost_or_repeated(trace):
    flat = [op for unit in fuse(trace, [COMPILER]).ops for op in (unit.body.ops if unit.body else [unit])]
    assert sorted(map(str, flat)) == sorted(map(str, trace.ops))


def chain(length: int) -> Trace:
    kind = TensorType((2,), torch.float32)
    ops = [
        Op(Target("a" if i % 7 else "other"), (Var(f"v{i}"), Var(f"v{max(0, i - 5)}")), out=Var(f"v{i + 1}"),
           phase=Phase.FW if i < length // 2 else Phase.BW)
        for i in range(length)
    ]
    types = {f"v{i}": kind for i in range(length + 1)}
    return Trace(("v0",), ops, (Var(f"v{length // 2}"),), (Var(f"v{length}"),), types)


def test_time_grows_linearly_with_the_trace():
    def seconds(trace: Trace) -> float:
        start = time.process_time()
        fuse(trace, [ANY])
        return time.process_time() - start

    short, long = chain(1000), chain(8000)
    assert min(seconds(long) for _ in range(3)) < 8 * 3 * min(seconds(short) for _ in range(3))
