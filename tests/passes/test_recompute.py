from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from textwrap import dedent

import pytest
import torch
from hypothesis import given

from jointtrace.errors import UnsupportedError
from jointtrace.ir.op import Op, Phase, Tag, TensorType, Var
from jointtrace.ir.text import parse
from jointtrace.ir.trace import Trace
from jointtrace.passes._again import NEVER
from jointtrace.passes._cost import KEPT_BYTE, PREMIUM, recompute_cost
from jointtrace.passes._cut import SINK, SOURCE, FlowGraph
from jointtrace.passes._save import HELD, save_costs
from jointtrace.passes.dce import dce
from jointtrace.passes.recompute import recompute, saved
from tests.strategies import assert_same_meaning, aten, call, get_grad, traces


def everything(op: Op) -> bool:
    return True


def nothing(op: Op) -> bool:
    return False


def elementwise(op: Op) -> bool:
    return Tag.COMPUTE_BOUND not in op.tags


def saved_after(text: str, fused=everything) -> tuple[str, ...]:
    """The saved set that `recompute` chooses; checks on the way that nothing else changed."""
    trace = parse(dedent(text))
    done = recompute(trace, fused=fused)
    assert_same_meaning(trace, done)
    assert done.ops[: done.boundary] == trace.ops[: trace.boundary]
    return saved(done)


MLP = """
trace (%x: f32[8, 4], %w: f32[4, 16], %v: f32[16, 2]) {
  fw:
    %a: f32[8, 16] = aten.mm.default(%x, %w)  # [compute_bound]
    %b: f32[8, 16] = aten.sigmoid.default(%a)
    %y: f32[8, 2] = aten.mm.default(%b, %v)  # [compute_bound]
  bw:
    %g: f32[8, 2] = get_grad(%y, 0)  # [get_grad]
    %bt: f32[16, 8] = aten.t.default(%b)  # [view]
    %dv: f32[16, 2] = aten.mm.default(%bt, %g)  # [compute_bound]
    %vt: f32[2, 16] = aten.t.default(%v)  # [view]
    %db: f32[8, 16] = aten.mm.default(%g, %vt)  # [compute_bound]
    %s: f32[8, 16] = aten.cos.default(%a)
    %da: f32[8, 16] = aten.mul.Tensor(%db, %s)
    %xt: f32[4, 8] = aten.t.default(%x)  # [view]
    %dw: f32[4, 16] = aten.mm.default(%xt, %da)  # [compute_bound]
  return (%y) grads (None, %dw, %dv)
}
"""


def test_a_cheap_value_is_computed_again_right_before_its_first_reader():
    done = recompute(parse(MLP), fused=elementwise)
    assert str(done) == dedent(
        """
        trace (%x: f32[8, 4], %w: f32[4, 16], %v: f32[16, 2]) by=recompute {
          fw:
            %a: f32[8, 16] = aten.mm.default(%x, %w)  # [compute_bound]
            %b: f32[8, 16] = aten.sigmoid.default(%a)
            %y: f32[8, 2] = aten.mm.default(%b, %v)  # [compute_bound]
          bw:
            %g: f32[8, 2] = get_grad(%y, 0)  # [get_grad]
            %bw_b: f32[8, 16] = aten.sigmoid.default(%a)
            %bt: f32[16, 8] = aten.t.default(%bw_b)  # [view]
            %dv: f32[16, 2] = aten.mm.default(%bt, %g)  # [compute_bound]
            %vt: f32[2, 16] = aten.t.default(%v)  # [view]
            %db: f32[8, 16] = aten.mm.default(%g, %vt)  # [compute_bound]
            %s: f32[8, 16] = aten.cos.default(%a)
            %da: f32[8, 16] = aten.mul.Tensor(%db, %s)
            %xt: f32[4, 8] = aten.t.default(%x)  # [view]
            %dw: f32[4, 16] = aten.mm.default(%xt, %da)  # [compute_bound]
          return (%y) grads (None, %dw, %dv)
        }
        """
    ).strip()
    assert saved(done) == ("x", "v", "a")


def test_where_nothing_is_cheap_all_that_the_backward_reads_is_saved():
    assert saved_after(MLP, nothing) == ("x", "v", "a", "b")


def test_a_compute_bound_op_is_not_computed_again_even_where_cheap_allows_it():
    assert saved_after(MLP, everything) == ("x", "v", "a")


def chain(first: str, rest: str = "", read: str = "b", inputs: str = "%x: f32[2, 3]") -> str:
    """The text of a trace: `first` makes %a from %x, `rest` follows; the backward reads %`read`."""
    return f"""
    trace ({inputs}) {{
      fw:
        {first}
        %b: f32[2, 3] = aten.sin.default(%a)
        {rest}
        %y: f32[2, 3] = aten.neg.default(%b)
      bw:
        %g: f32[2, 3] = get_grad(%y, 0)  # [get_grad]
        %dx: f32[2, 3] = aten.mul.Tensor(%g, %{read})
      return (%y) grads (%dx)
    }}
    """


def test_inputs_are_free_to_save():
    assert saved_after(chain("%a: f32[2, 3] = aten.cos.default(%x)")) == ("x",)


@pytest.mark.parametrize(("between", "kept"), [
    ("aten.mm.default(%q, %d)  # [compute_bound]", "s"), ("aten.cos.default(%d)", "a")], ids=["two loops", "one loop"])
def test_what_two_loops_need_is_saved_where_computing_it_again_would_write_it_to_memory(between, kept):
    text = f"""
    trace (%x: bf16[8, 4], %w: bf16[4, 16], %r: f32[8, 16], %q: f32[8, 8]) {{
      fw:
        %a: bf16[8, 16] = aten.mm.default(%x, %w)  # [compute_bound]
        %s: f32[8, 16] = aten.add.Tensor(%r, %a)
        %y: f32[8, 16] = aten.sin.default(%s)
      bw:
        %g: f32[8, 16] = get_grad(%y, 0)  # [get_grad]
        %c: f32[8, 16] = aten.cos.default(%s)
        %d: f32[8, 16] = aten.mul.Tensor(%g, %c)
        %m: f32[8, 16] = {between}
        %dr: f32[8, 16] = aten.mul.Tensor(%m, %s)
      return (%y) grads (None, None, %dr, None)
    }}
    """
    assert saved_after(text, elementwise)[-1] == kept


def test_of_equally_large_values_the_last_is_saved():
    text = chain("%r: f32[2, 3] = aten.rand_like.default(%x)  # [random]\n        %a: f32[2, 3] = aten.cos.default(%r)")
    assert saved_after(text) == ("b",)


def test_a_smaller_value_that_leads_to_what_the_backward_reads_is_saved_instead():
    text = chain(
        "%r: f32[1, 3] = aten.rand.default([1, 3])  # [random]\n"
        "        %a: f32[2, 3] = aten.expand.default(%r, [2, 3])  # [view]"
    )
    assert saved_after(text) == ("r",)


def test_what_reads_only_constants_is_computed_again_from_nothing():
    assert saved_after(chain("%a: f32[2, 3] = aten.full.default([2, 3], 0.5)")) == ()


def test_rand_is_saved_never_drawn_again():
    text = chain("%a: f32[2, 3] = aten.rand_like.default(%x)  # [random]", read="a")
    assert saved_after(text) == ("a",)


def test_opaque_communicating_and_user_claimed_ops_are_not_computed_again():
    for tag in ("opaque", "collective", "claimed"):
        assert saved_after(chain(f"%a: f32[2, 3] = aten.cos.default(%x)  # [{tag}]", read="a")) == ("a",), tag


def test_a_wait_does_not_run_again():
    text = chain(
        "%c: f32[2, 3] = aten.cos.default(%x)  # [collective]\n"
        "        %a: f32[2, 3] = aten.neg.default(%c)  # [wait]",
        read="a",
    )
    assert saved_after(text.replace("(%g, %a)", "(%c, %a)")) == ("c", "a")


CHECKPOINT = """
trace (%x: f32[4, 4], %w: f32[4, 4]) {
  fw:
    %r: f32[4, 4] = aten.rand_like.default(%x)  # [random, recompute]
    %a: f32[4, 4] = aten.mm.default(%x, %w)  # [compute_bound, recompute]
    %b: f32[4, 4] = aten.sin.default(%a)  # [recompute]
    %c: f32[4, 4] = aten.mul.Tensor(%b, %r)  # [recompute]
    %y: f32[4, 4] = aten.neg.default(%c)
  bw:
    %g: f32[4, 4] = get_grad(%y, 0)  # [get_grad]
    %d: f32[4, 4] = aten.mul.Tensor(%g, %c)
    %e: f32[4, 4] = aten.mul.Tensor(%d, %b)
  return (%y) grads (%e, None)
}
"""


def test_a_checkpoint_computes_all_its_ops_again_in_order_and_keeps_only_the_drawn_mask():
    trace = parse(CHECKPOINT)
    done = recompute(trace, fused=nothing)
    assert_same_meaning(trace, done)
    assert saved(done) == ("x", "w", "r")
    backward = [(op.outs[0], op.tags) for op in done.ops[done.boundary :]]
    assert backward == [
        ("g", frozenset({Tag.GET_GRAD})),
        ("bw_a", frozenset({Tag.COMPUTE_BOUND})),
        ("bw_b", frozenset()),
        ("bw_c", frozenset()),
        ("d", frozenset()),
        ("e", frozenset()),
    ]


def test_an_output_of_the_function_made_in_a_checkpoint_is_saved_as_the_caller_keeps_it_anyway():
    assert saved_after(CHECKPOINT.replace("return (%y)", "return (%y, %b)"), nothing) == ("r", "b")


def test_a_checkpointed_op_that_reads_overwritten_memory_has_its_result_saved():
    text = """
    trace (%x: f32[2], %n: f32[2]) {
      fw:
        %a: f32[2] = aten.mul.Tensor(%x, %n)  # [recompute]
        %b: f32[2] = aten.sin.default(%a)  # [recompute]
        %k: f32[2] = aten.add_.Tensor(%n, 1)  # [mutates] writes(%n)
        %y: f32[2] = aten.neg.default(%b)
      bw:
        %g: f32[2] = get_grad(%y, 0)  # [get_grad]
        %dx: f32[2] = aten.mul.Tensor(%g, %b)
      return (%y) grads (%dx, None)
    }
    """
    assert saved_after(text) == ("a",)


def test_what_reads_memory_that_is_overwritten_through_a_view_is_not_computed_again():
    text = """
    trace (%x: f32[2, 3]) {
      fw:
        %a: f32[2, 3] = aten.sin.default(%x)
        %v: f32[3, 2] = aten.t.default(%x)  # [view]
        %k: f32[3, 2] = aten.add_.Tensor(%v, 1)  # [mutates] writes(%v)
        %y: f32[2, 3] = aten.neg.default(%a)
      bw:
        %g: f32[2, 3] = get_grad(%y, 0)  # [get_grad]
        %dx: f32[2, 3] = aten.mul.Tensor(%g, %a)
      return (%y) grads (%dx)
    }
    """
    assert saved_after(text) == ("a",)


def test_what_reads_memory_that_the_backward_writes_to_is_not_computed_again():
    text = """
    trace (%x: f32[2], %n: f32[2]) {
      fw:
        %a: f32[2] = aten.sin.default(%n)
        %y: f32[2] = aten.mul.Tensor(%a, %x)
      bw:
        %g: f32[2] = get_grad(%y, 0)  # [get_grad]
        %k: f32[2] = aten.add_.Tensor(%n, %g)  # [mutates] writes(%n)
        %dx: f32[2] = aten.mul.Tensor(%g, %a)
      return (%y) grads (%dx, None)
    }
    """
    assert saved_after(text) == ("n", "a")


OVERWRITTEN = """
trace (%x: f32[2], %w: f32[2]) {
  fw:
    %y: f32[2] = aten.mul.Tensor(%x, %w)  # model.py:3
    %k: f32[2] = aten.add_.Tensor(%x, 1)  # [mutates] writes(%x) model.py:4
  bw:
    %g: f32[2] = get_grad(%y, 0)  # [get_grad]
    %dw: f32[2] = aten.mul.Tensor(%g, %x)  # model.py:3
  return (%y) grads (None, %dw)
}
"""


def test_a_backward_that_reads_what_the_forward_overwrote_is_refused_with_both_lines():
    with pytest.raises(UnsupportedError) as caught:
        recompute(parse(OVERWRITTEN), fused=everything)
    assert str(caught.value) == (
        "%x is saved for the backward, but overwritten in place: aten.add_.Tensor at model.py:4 writes to it, "
        "then the backward's aten.mul.Tensor at model.py:3 reads it; "
        "write to a clone of it, or use the operation that is not in place"
    )


def test_a_backward_that_reads_an_overwritten_value_through_a_view_is_refused():
    text = OVERWRITTEN.replace("%y: f32[2] =", "%v: f32[2] = aten.view.default(%x, [2])  # [view]\n    %y: f32[2] =")
    with pytest.raises(UnsupportedError, match="%v is saved for the backward, but overwritten in place"):
        recompute(parse(text.replace("(%g, %x)", "(%g, %v)")), fused=everything)


def test_a_gradient_that_is_an_overwritten_value_is_refused():
    text = OVERWRITTEN.replace("(None, %dw)", "(%x, None)").replace("(%g, %x)", "(%g, %w)")
    with pytest.raises(UnsupportedError, match=r"overwritten in place: .* it is returned as a gradient"):
        recompute(parse(text), fused=nothing)


def test_a_backward_that_reads_the_result_of_a_write_is_accepted():
    assert saved_after(OVERWRITTEN.replace("(%g, %x)", "(%g, %k)")) == ("k",)


def test_an_input_that_the_trace_writes_to_is_not_free():
    costs = save_costs(parse(OVERWRITTEN))
    assert (costs["x"], costs["k"], costs["w"], costs["y"]) == (8, 8, 1, 1)


def test_two_views_of_one_base_are_saved_as_the_base():
    text = """
    trace (%x: f32[4, 6]) {
      fw:
        %r: f32[4, 6] = aten.rand_like.default(%x)  # [random]
        %a: f32[2, 6] = aten.slice.Tensor(%r, 0, 0, 2)  # [view]
        %b: f32[2, 6] = aten.slice.Tensor(%r, 0, 2, 4)  # [view]
        %y: f32[2, 6] = aten.mul.Tensor(%a, %b)
      bw:
        %g: f32[2, 6] = get_grad(%y, 0)  # [get_grad]
        %da: f32[2, 6] = aten.mul.Tensor(%g, %b)
        %db: f32[2, 6] = aten.mul.Tensor(%g, %a)
        %dx: f32[4, 6] = aten.cat.default([%da, %db], 0)
      return (%y) grads (%dx)
    }
    """
    assert saved_after(text) == ("r",)


def test_an_input_is_saved_instead_of_a_view_of_it():
    text = chain("%a: f32[2, 3] = aten.view.default(%x, [2, 3])  # [view]", read="a")
    assert saved_after(text) == ("x",)


def test_a_value_is_saved_instead_of_its_only_view():
    text = chain(
        "%r: f32[2, 3] = aten.rand.default([2, 3])  # [random]\n"
        "        %a: f32[2, 3] = aten.view.default(%r, [2, 3])  # [view]",
        read="a",
    )
    assert saved_after(text) == ("r",)


def test_saving_a_slice_costs_the_bytes_of_its_whole_base():
    text = """
    trace (%x: f32[1, 2]) {
      fw:
        %r: f32[4, 6] = aten.rand.default([4, 6])  # [random]
        %a: f32[1, 2] = aten.slice.Tensor(%r, 0, 0, 1)  # [view]
        %e: f32[4, 2] = aten.expand.default(%a, [4, 2])  # [view]
        %c: f32[8] = aten.reshape.default(%e, [8])  # [view]
      return (%c)
    }
    """
    costs = save_costs(parse(text))
    assert (costs["r"], costs["a"]) == (1, 2)  # alive as long as the output, as far as the trace tells
    costs = save_costs(parse(text.replace("return (%c)", "return (None)")))
    assert (costs["r"], costs["a"], costs["e"], costs["c"]) == (96, 97, 98, 99)


def test_the_copy_that_reshaping_an_expanded_input_makes_is_not_free():
    text = """
    trace (%x: f32[1, 2]) {
      fw:
        %e: f32[4, 2] = aten.expand.default(%x, [4, 2])  # [view]
        %c: f32[8] = aten.reshape.default(%e, [8])  # [view]
      return (None)
    }
    """
    costs = save_costs(parse(text))
    assert (costs["x"], costs["c"]) == (1, 34)


def test_an_op_with_two_results_runs_again_once_for_both():
    text = """
    trace (%x: f32[2, 3]) {
      fw:
        (%a: f32[3], %i: i64[3]) = aten.max.dim(%x, 0)
        %y: f32[3] = aten.sin.default(%a)
      bw:
        %g: f32[3] = get_grad(%y, 0)  # [get_grad]
        %c: f32[3] = aten.mul.Tensor(%g, %a)
        %z: f32[2, 3] = aten.zeros_like.default(%x)
        %u: i64[1, 3] = aten.unsqueeze.default(%i, 0)  # [view]
        %v: f32[1, 3] = aten.unsqueeze.default(%c, 0)  # [view]
        %dx: f32[2, 3] = aten.scatter.src(%z, 0, %u, %v)
      return (%y) grads (%dx)
    }
    """
    done = recompute(parse(text), fused=everything)
    assert saved_after(text) == ("x",)
    assert [op.target.name for op in done.ops].count("aten.max.dim") == 2


def test_a_name_that_is_taken_is_not_used_again():
    text = chain("%a: f32[2, 3] = aten.cos.default(%x)\n        %bw_b: f32[2, 3] = aten.neg.default(%x)")
    done = recompute(parse(text), fused=everything)
    made = [name for op in done.ops for name in op.outs]
    assert len(set(made)) == len(made)
    assert saved_after(text) == ("x",)


def test_a_gradient_that_is_a_forward_value_is_computed_again_at_the_end():
    text = """
    trace (%x: f32[2, 3]) {
      fw:
        %a: f32[2, 3] = aten.cos.default(%x)
        %y: f32[2, 3] = aten.neg.default(%a)
      bw:
        %g: f32[2, 3] = get_grad(%y, 0)  # [get_grad]
      return (%y) grads (%a)
    }
    """
    done = recompute(parse(text), fused=everything)
    assert done.grads == (Var("bw_a"),)
    assert saved_after(text) == ("x",)


def test_get_grad_keeps_naming_its_output_where_that_is_computed_again():
    text = """
    trace (%x: f32[2, 3]) {
      fw:
        (%y: f32[3], %i: i64[3]) = aten.max.dim(%x, 0)  # [recompute]
      bw:
        %c: f32[3] = aten.mul.Tensor(%i, 2.0)
        %g: f32[3] = get_grad(%y, 0)  # [get_grad]
        %d: f32[3] = aten.mul.Tensor(%g, %c)
        %dx: f32[2, 3] = aten.mul.Tensor(%x, %d)
      return (%y) grads (%dx)
    }
    """
    done = recompute(parse(text), fused=nothing)
    assert saved(done) == ("x",)
    assert next(op for op in done.ops if Tag.GET_GRAD in op.tags).ins == ("y",)


def test_a_trace_without_a_backward_stays_as_it_is():
    trace = parse("trace (%x: f32[2]) {\nfw:\n%y: f32[2] = aten.sin.default(%x)\nreturn (%y)\n}")
    assert recompute(trace, fused=everything) == trace


def test_an_impossible_choice_is_explained_by_its_chain_of_reasons():
    graph = FlowGraph()
    graph.add(SOURCE, "a", None, "%a is not computed again: it is an input")
    graph.add("a", "b", None, "%a must not be saved")
    graph.add("a", "c", 5, "%a is saved")
    graph.add("b", SINK, None, "the backward reads %a")
    graph.add("c", SINK, None, "the backward reads %c")
    with pytest.raises(UnsupportedError, match="it is an input; %a must not be saved; the backward reads %a"):
        graph.sink_side()


@given(traces())
def test_recompute_keeps_the_meaning_and_copies_each_op_once(trace):
    text = str(trace)
    done = recompute(trace, fused=elementwise)
    assert_same_meaning(trace, done)
    assert str(trace) == text
    assert done.ops[: done.boundary] == trace.ops[: trace.boundary]
    kept = {op.outs for op in trace.ops}
    copies = [op for op in done.ops if op.outs not in kept]
    assert len({op.outs for op in copies}) == len(copies) <= trace.boundary
    assert not any(op.writes or op.tags & NEVER or Tag.RECOMPUTE in op.tags or op.phase is Phase.FW for op in copies)


@given(traces(max_ops=6, writes=False))
def test_no_other_choice_costs_less(trace):
    trace = dce(trace)
    done = recompute(trace, fused=elementwise)
    sizes = save_costs(trace)
    forward = {out: op for op in trace.ops[: trace.boundary] for out in op.outs}
    copies = {name.removeprefix("bw_") for op in done.ops[done.boundary:] for name in op.outs if name.startswith("bw_")}
    least = min(_choices(trace, sizes), default=0)
    assert _cost(trace, sizes, set(saved(done)), {forward[name].outs[0] for name in copies}) == least


def _cost(trace: Trace, sizes: dict[str, int], kept: set[str], again: set[str]) -> int:
    forward = {op.outs[0]: op for op in trace.ops[: trace.boundary] if op.outs}
    keeping = sum(sizes[name] if sizes[name] <= HELD else KEPT_BYTE * PREMIUM * sizes[name] for name in kept)
    return keeping + sum(recompute_cost(forward[name], trace.types, elementwise) for name in again)


def _choices(trace: Trace, costs: dict[str, int]):
    """Every way to feed the backward: what it costs."""
    maker = {name: op for op in trace.ops[: trace.boundary] for name in op.outs}
    held = {*trace.inputs, *trace.output_names}
    for count in range(len(costs) + 1):
        for chosen in itertools.combinations(costs, count):
            again: set[str] = set()
            todo = [name for name in saved(trace) if name not in chosen]
            while todo:
                name = todo.pop()
                if name in again:
                    continue
                again.add(name)
                op = maker.get(name)
                if op is None or op.tags & NEVER or (Tag.RECOMPUTE not in op.tags and not elementwise(op)):
                    break
                todo.extend(n for n in op.ins if n not in chosen)
            else:
                if not any(Tag.RECOMPUTE in maker[n].tags and costs[n] != HELD and not maker[n].tags & NEVER
                           for n in chosen if n in maker and n not in held):
                    yield _cost(trace, costs, set(chosen), {maker[name].outs[0] for name in again})


SEEDED = """
from jointtrace.ir.text import parse
from jointtrace.passes.recompute import recompute
print(recompute(parse({text!r}), fused=lambda op: True))
"""


def test_the_choice_does_not_depend_on_the_hash_seed():
    ops = [f"%r{i}: f32[2] = aten.rand_like.default(%x)  # [random]" for i in range(4)]
    ops += [f"%a{i}_{j}: f32[2] = aten.mul.Tensor(%r{i}, %r{j})" for i in range(4) for j in range(4)]
    ops += ["%y: f32[2] = aten.sin.default(%a0_0)"]
    backward = ["%g: f32[2] = get_grad(%y, 0)  # [get_grad]", "%d0: f32[2] = aten.neg.default(%g)"]
    backward += [f"%d{k + 1}: f32[2] = aten.mul.Tensor(%d{k}, %a{k // 4}_{k % 4})" for k in range(16)]
    text = "\n".join(["trace (%x: f32[2]) {", "fw:", *ops, "bw:", *backward, "return (%y) grads (%d16)", "}"])
    runs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SEEDED.format(text=text)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("0", "1", "31")
    ]
    results = [run.communicate(timeout=120)[0] for run in runs]
    assert all(run.returncode == 0 for run in runs)
    assert "bw_a3_2" in results[0]
    assert results[1:] == results[:1] * 2


def long_trace(ops: int) -> Trace:
    """A residual chain: each layer is one matrix product and three cheap ops, each backward layer reads two of them."""
    names, forward, backward, types = iter(range(10**9)), [], [], {}
    shape = TensorType((4, 4), torch.float32)

    def add(where: list[Op], overload, *args: str, phase: Phase) -> str:
        name = f"v{next(names)}"
        types[name] = shape
        where.append(call(overload, *map(Var, args), out=Var(name), phase=phase))
        return name

    x, layers = "x", []
    for _ in range(ops // 8):
        m = add(forward, aten.mm.default, x, "w", phase=Phase.FW)
        s = add(forward, aten.sin.default, m, phase=Phase.FW)
        t = add(forward, aten.mul.Tensor, s, x, phase=Phase.FW)
        x = add(forward, aten.add.Tensor, t, x, phase=Phase.FW)
        layers.append((s, t, x))
    g = "g"
    backward.append(get_grad(x, 0, g))
    for layer in reversed(layers):
        for value in layer:
            g = add(backward, aten.mul.Tensor, g, value, phase=Phase.BW)
        g = add(backward, aten.neg.default, g, phase=Phase.BW)
    types.update(x=shape, w=shape, g=shape)
    return Trace(("x", "w"), (*forward, *backward), (Var(x),), (Var(g), None), types)


def test_a_trace_of_5000_ops_takes_well_under_a_second_per_thousand():
    trace = long_trace(5000)
    start = time.process_time()
    recompute(trace, fused=elementwise)
    assert time.process_time() - start < 2.0
