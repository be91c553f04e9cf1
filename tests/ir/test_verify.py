"""Every invariant has a trace that breaks it, and is refused with the op named."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from strategies import aten, call, get_grad, traces

from jointtrace.errors import VerifyError
from jointtrace.ir.op import Op, Phase, Source, Symbol, Tag, Target, TensorType, Var
from jointtrace.ir.text import parse
from jointtrace.ir.trace import Trace
from jointtrace.ir.verify import verify

VALID = """
trace (%x: f32[2, 3], %w: f32[2, 3]) {
  fw:
    %a: f32[2, 3] = aten.mul.Tensor(%x, %w)
    %b: f32[2, 3] = aten.sin.default(%a)  # model.py:12
  bw:
    %g: f32[2, 3] = get_grad(%b, 0)  # [get_grad]
    %gx: f32[2, 3] = aten.mul.Tensor(%g, %a)
  return (%b) grads (%gx, None)
}
"""


def edited(old: str, new: str) -> Trace:
    assert old in VALID
    return parse(VALID.replace(old, new))


def forward(*lines: str, inputs: str = "%x: f32[6]", outputs: str = "") -> Trace:
    """A forward-only trace with these ops."""
    body = "\n".join(f"    {line}" for line in lines)
    return parse(f"trace ({inputs}) {{\n  fw:\n{body}\n  return ({outputs})\n}}\n")


def region(body: Trace, **fields) -> Trace:
    """A trace of one region over `%x: f32[2, 3]`."""
    type_ = TensorType((2, 3), torch.float32)
    op = Op(**{"target": Target("eager_0_fw"), "args": (Var("x"),), "out": (Var("y"),), "body": body, **fields})
    return Trace(("x",), (op,), (Var("y"),), types={"x": type_, "y": type_})


def refuse(trace: Trace, message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify(trace, after="cse")
    assert str(caught.value) == f"after cse: {message}"


BODY = """
trace (%a: f32[2, 3]) {
  fw:
    %b: f32[2, 3] = aten.sin.default(%a)
  return (%b)
}
"""


def test_a_valid_trace_is_accepted():
    verify(parse(VALID))
    verify(region(parse(BODY)))


@given(traces())
def test_generated_traces_are_valid(trace):
    verify(trace)


def test_a_value_made_twice_is_refused():
    refuse(
        edited("%b: f32[2, 3] = aten.sin.default(%a)", "%a: f32[2, 3] = aten.sin.default(%x)"),
        "op 1 (aten.sin.default -> %a) from model.py:12: makes %a a second time",
    )


def test_an_input_made_again_is_refused():
    refuse(edited("%a: f32[2, 3] =", "%x: f32[2, 3] ="), "op 0 (aten.mul.Tensor -> %x): makes %x a second time")


def test_an_input_named_twice_is_refused():
    refuse(edited("%w: f32[2, 3])", "%x: f32[2, 3])"), "input %x: makes %x a second time")


def test_a_use_before_the_definition_is_refused():
    trace = parse(VALID)
    first, second, *rest = trace.ops
    refuse(
        replace(trace, ops=(second, first, *rest)),
        "op 0 (aten.sin.default -> %b) from model.py:12: reads %a, which nothing before it makes",
    )


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [("return (%b)", "return (%b, %c)", "output %c"), ("(%gx, None)", "(%c, None)", "gradient %c")],
)
def test_a_result_that_nothing_makes_is_refused(old, new, what):
    refuse(edited(old, new), f"{what}: nothing makes it")


def test_a_value_without_a_type_is_refused():
    refuse(edited("%a: f32[2, 3] =", "%a ="), "op 0 (aten.mul.Tensor -> %a): %a has no type")


def test_an_input_without_a_type_is_refused():
    refuse(edited("%w: f32[2, 3])", "%w)"), "input %w: %w has no type")


def test_grads_of_some_inputs_only_are_refused():
    refuse(edited("grads (%gx, None)", "grads (%gx)"), "grads: 1 of them for 2 inputs")


def test_a_forward_op_after_a_backward_op_is_refused():
    trace = parse(VALID)
    a, b, g, gx = trace.ops
    late = call(aten.sin.default, Var("a"), out=Var("c"))
    refuse(
        trace.rebuild([a, b, g, gx, late], by="", types={"c": trace.types["a"]}),
        "op 4 (aten.sin.default -> %c): a forward op after the first backward op (2)",
    )


def test_a_forward_op_that_reads_a_backward_value_is_refused():
    trace = parse(VALID)
    late = call(aten.sin.default, Var("gx"), out=Var("c"))
    refuse(
        trace.rebuild([*trace.ops, late], by="", types={"c": trace.types["a"]}),
        "op 4 (aten.sin.default -> %c): a forward op after the first backward op (2), "
        "and reads %gx, which the backward makes",
    )


def test_a_get_grad_in_the_forward_is_refused():
    trace = parse(VALID)
    a, b, g, _ = trace.ops
    refuse(
        trace.rebuild([a, b, g.replace(phase=Phase.FW)], by="", grads=()),
        "op 2 (get_grad -> %g): reads a cotangent in the forward",
    )


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ("%b", "its arguments are not an output and its position"),
        ("0, %b", "its arguments are not an output and its position"),
        ("%b, 1", "output 1 is not %b"),
        ("%b, -1", "output -1 is not %b"),
        ("%a, 0", "output 0 is not %a"),
    ],
)
def test_a_get_grad_of_no_output_is_refused(args, problem):
    refuse(edited("get_grad(%b, 0)", f"get_grad({args})"), f"op 2 (get_grad -> %g): {problem}")


def test_a_tensor_returned_twice_has_a_cotangent_for_each_position():
    trace = edited("return (%b)", "return (%b, %b)")
    second = get_grad("b", 1, "g_1")
    verify(trace.rebuild([*trace.ops, second], by="", types={"g_1": trace.types["g"]}))


def test_two_get_grads_of_one_position_are_refused():
    trace = parse(VALID)
    refuse(
        trace.rebuild([*trace.ops, get_grad("b", 0, "g_1")], by="", types={"g_1": trace.types["g"]}),
        "op 4 (get_grad -> %g_1): reads the cotangent of output 0, as op 2 (get_grad -> %g) does",
    )


def test_writes_without_the_tag_are_refused():
    refuse(
        forward("%y: f32[6] = aten.copy_.default(%x, %x)  # writes(%x)"),
        "op 0 (aten.copy_.default -> %y): writes without the tag `mutates`",
    )


def test_the_tag_without_writes_is_refused():
    refuse(
        forward("%y: f32[6] = aten.copy_.default(%x, %x)  # [mutates]"),
        "op 0 (aten.copy_.default -> %y): tag `mutates`, but no writes",
    )


def test_a_write_to_a_value_that_the_op_is_not_given_is_refused():
    refuse(
        forward("%y: f32[6] = aten.sin_.default(%w)  # [mutates] writes(%x)", inputs="%x: f32[6], %w: f32[6]"),
        "op 0 (aten.sin_.default -> %y): writes to %x, which it does not read",
    )


WRITE = "%y: f32[6] = aten.sin_.default(%x)  # [mutates] writes(%x)"


def test_reading_what_was_overwritten_is_refused():
    refuse(
        forward(WRITE, "%z: f32[6] = aten.sin.default(%x)"),
        "op 1 (aten.sin.default -> %z): reads %x after op 0 (aten.sin_.default -> %y) has overwritten it",
    )


def test_reading_a_view_of_what_was_overwritten_is_refused():
    refuse(
        forward("%v: f32[6] = aten.view.default(%x, [6])  # [view]", WRITE, "%z: f32[6] = aten.sin.default(%v)"),
        "op 2 (aten.sin.default -> %z): reads %v after op 1 (aten.sin_.default -> %y) has overwritten it",
    )


def test_reading_the_base_of_a_view_that_was_overwritten_is_refused():
    refuse(
        forward(
            "%v: f32[6] = aten.view.default(%x, [6])  # [view]",
            "%y: f32[6] = aten.sin_.default(%v)  # [mutates] writes(%v)",
            "%z: f32[6] = aten.sin.default(%x)",
        ),
        "op 2 (aten.sin.default -> %z): reads %x after op 1 (aten.sin_.default -> %y) has overwritten it",
    )


def test_the_result_of_a_write_and_its_views_may_be_read():
    verify(
        forward(
            WRITE,
            "%v: f32[6] = aten.view.default(%y, [6])  # [view]",
            "%y_1: f32[6] = aten.sin_.default(%v)  # [mutates] writes(%v)",
            "%z: f32[6] = aten.sin.default(%y_1)",
        )
    )


def test_the_result_of_a_first_write_is_overwritten_by_a_second():
    refuse(
        forward(
            WRITE,
            "%y_1: f32[6] = aten.sin_.default(%y)  # [mutates] writes(%y)",
            "%z: f32[6] = aten.sin.default(%y)",
        ),
        "op 2 (aten.sin.default -> %z): reads %y after op 1 (aten.sin_.default -> %y_1) has overwritten it",
    )


def test_a_second_write_may_name_what_the_first_one_overwrote():
    copy = "aten.copy_.default(%x, %w)  # [mutates] writes(%x)"
    inputs = "%x: f32[6], %w: f32[6]"
    verify(forward(f"%y: f32[6] = {copy}", f"%z: f32[6] = {copy}", inputs=inputs))
    refuse(
        forward(f"%y: f32[6] = {copy}", f"%z: f32[6] = {copy}", "%u: f32[6] = aten.sin.default(%y)", inputs=inputs),
        "op 2 (aten.sin.default -> %u): reads %y after op 1 (aten.copy_.default -> %z) has overwritten it",
    )


def test_the_results_of_an_op_with_two_writes_stand_for_one_each():
    pair = "(%p: f32[6], %q: f32[6]) = both_(%x, %w)  # [mutates] writes(%x, %w)"
    again = "%p_1: f32[6] = aten.sin_.default(%p)  # [mutates] writes(%p)"
    verify(forward(pair, again, "%z: f32[6] = aten.sin.default(%q)", inputs="%x: f32[6], %w: f32[6]"))


def test_the_cotangent_of_an_overwritten_output_may_be_read():
    lines = ("trace (%x: f32[6]) {", "fw:", WRITE, "bw:", "%g: f32[6] = get_grad(%x, 0)  # [get_grad]")
    verify(parse("\n".join((*lines, "return (%x) grads (%g)", "}\n"))))


def test_a_body_that_reads_a_value_of_the_trace_around_it_is_refused():
    refuse(
        region(parse(BODY.replace("sin.default(%a)", "sin.default(%x)"))),
        "op 0 (eager_0_fw -> %y), in its body, op 0 (aten.sin.default -> %b): reads %x, which nothing before it makes",
    )


def test_a_broken_branch_among_the_arguments_is_refused():
    branch = parse(BODY.replace("return (%b)", "return (%c)"))
    refuse(
        region(parse(BODY), args=(Var("x"), branch)),
        "op 0 (eager_0_fw -> %y), in its body, output %c: nothing makes it",
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("trace (%a: f32[2, 3])", "trace (%a: f32[2, 3], %c: f32[])",
         "its arguments and its body's inputs: 1 and 2 values"),
        ("%a: f32[2, 3]", "%a: f32[2, 2]",
         "its arguments and its body's inputs: %x: f32[2, 3], but %a: f32[2, 2]"),
        ("return (%b)", "return (%b, %b)", "its results and its body's outputs: 1 and 2 values"),
        ("%b: f32[2, 3]", "%b: f64[2, 3]",
         "its results and its body's outputs: %y: f32[2, 3], but %b: f64[2, 3]"),
        ("%b: f32[2, 3]", "%b", "its results and its body's outputs: %b has no type"),
    ],
)  # fmt: skip
def test_a_body_that_does_not_match_its_op_is_refused(old, new, problem):
    refuse(region(parse(BODY.replace(old, new))), f"op 0 (eager_0_fw -> %y): {problem}")


def test_strides_that_only_the_body_knows_match():
    verify(region(parse(BODY.replace("%a: f32[2, 3]", "%a: f32[2, 3][3, 1]"))))


def test_a_body_of_other_sizes_is_refused():
    type_ = TensorType((Symbol("s0", 2), 3), torch.float32)
    body = parse(BODY)
    refuse(
        region(replace(body, types={"a": type_, "b": type_})),
        "op 0 (eager_0_fw -> %y): its arguments and its body's inputs: %x: f32[2, 3], but %a: f32[s0=2, 3]",
    )


def test_a_region_that_hides_a_write_is_refused():
    body = parse(BODY.replace("sin.default(%a)", "sin_.default(%a)  # [mutates] writes(%a)"))
    refuse(
        region(body),
        "op 0 (eager_0_fw -> %y): its body writes to %a, but the op does not declare to write to %x",
    )
    verify(region(body, tags=frozenset({Tag.MUTATES}), writes=("x",)))


def test_a_region_that_writes_through_a_view_is_refused_like_one_that_writes():
    lines = "%v: f32[6] = aten.view.default(%a, [6])  # [view]\n%b: f32[2, 3] = f_(%v)  # [mutates] writes(%v)"
    refuse(
        region(parse(BODY.replace("%b: f32[2, 3] = aten.sin.default(%a)", lines))),
        "op 0 (eager_0_fw -> %y): its body writes to %a, but the op does not declare to write to %x",
    )


@pytest.mark.parametrize("tag", [Tag.COLLECTIVE, Tag.GET_GRAD])
def test_a_collective_or_a_cotangent_in_a_region_is_refused(tag):
    refuse(
        region(parse(BODY.replace("sin.default(%a)", f"sin.default(%a)  # [{tag.value}] model.py:3"))),
        "op 0 (eager_0_fw -> %y), in its body, op 0 (aten.sin.default -> %b) from model.py:3: "
        "must not stand in a region",
    )


def test_a_region_over_the_boundary_is_refused():
    line = "  bw:\n    %c: f32[2, 3] = aten.cos.default(%b)\n  return (%c)"
    refuse(
        region(parse(BODY.replace("  return (%b)", line))),
        "op 0 (eager_0_fw -> %y): a region over the boundary between forward and backward",
    )


def test_a_region_over_two_devices_is_refused():
    line = "%c: f32[2, 3] cuda:0 = aten.cos.default(%a)\n    %b: f32[2, 3] ="
    refuse(
        region(parse(BODY.replace("%b: f32[2, 3] =", line))),
        "op 0 (eager_0_fw -> %y): a region over 2 devices: cpu, cuda:0",
    )


def test_the_fault_stands_alone_where_no_pass_is_named():
    with pytest.raises(VerifyError) as caught:
        verify(edited("%a: f32[2, 3] =", "%a ="))
    assert str(caught.value) == "op 0 (aten.mul.Tensor -> %a): %a has no type"


def test_the_source_of_the_op_is_in_the_message():
    op = call(aten.sin.default, Var("nowhere"), out=Var("y"), source=Source("model.py", 3, "head"))
    refuse(
        Trace((), (op,), (), types={"y": TensorType((), torch.float32)}),
        "op 0 (aten.sin.default -> %y) from model.py:3 (head): reads %nowhere, which nothing before it makes",
    )
