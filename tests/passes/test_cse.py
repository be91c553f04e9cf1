from __future__ import annotations

from hypothesis import given

from jointtrace.ir.text import parse
from jointtrace.passes.cse import cse
from tests.strategies import assert_same_meaning, traces


def forward(body: str, outputs: str, inputs: str = "%x: f32[2, 3]") -> str:
    """The text of a forward-only trace."""
    return f"trace ({inputs}) {{\nfw:\n{body}\nreturn ({outputs})\n}}"


def ops_after_cse(text: str) -> int:
    trace = parse(text)
    merged = cse(trace)
    assert_same_meaning(trace, merged)
    return len(merged.ops)


def test_what_the_users_checkpoint_asks_to_save_is_not_merged_into_something_that_is_not_saved():
    body = "%a: f32[2, 3] = aten.sin.default(%x)\n%b: f32[2, 3] = aten.sin.default(%x)  # [save]\n"
    body += "%y: f32[2, 3] = aten.mul.Tensor(%a, %b)"
    assert ops_after_cse(forward(body, "%y")) == 3


def test_a_repeated_expression_is_computed_once():
    trace = parse(
        """
        trace (%x: f32[2, 3]) {
          fw:
            %a: f32[2, 3] = aten.sin.default(%x)
            %b: f32[2, 3] = aten.sin.default(%x)
            %c: f32[2, 3] = aten.neg.default(%a)
            %d: f32[2, 3] = aten.neg.default(%b)
            %y: f32[2, 3] = aten.mul.Tensor(%c, %d)
          return (%y)
        }
        """
    )
    assert str(cse(trace)) == (
        "trace (%x: f32[2, 3]) by=cse {\n"
        "  fw:\n"
        "    %a: f32[2, 3] = aten.sin.default(%x)\n"
        "    %c: f32[2, 3] = aten.neg.default(%a)\n"
        "    %y: f32[2, 3] = aten.mul.Tensor(%c, %c)\n"
        "  return (%y)\n"
        "}"
    )


def test_rand_is_never_merged():
    assert ops_after_cse(forward(
        """
        %a: f32[2, 3] = aten.rand_like.default(%x)  # [random]
        %b: f32[2, 3] = aten.rand_like.default(%x)  # [random]
        %y: f32[2, 3] = aten.sub.Tensor(%a, %b)
        """, "%y",
    )) == 3


def test_get_grad_is_never_merged():
    # one value returned twice has two cotangents; even two readers of one position stay apart
    trace = parse(
        """
        trace (%x: f32[]) {
          fw:
            %y: f32[] = aten.sin.default(%x)
          bw:
            %g: f32[] = get_grad(%y, 0)  # [get_grad]
            %h: f32[] = get_grad(%y, 0)  # [get_grad]
            %dx: f32[] = aten.add.Tensor(%g, %h)
          return (%y) grads (%dx)
        }
        """
    )
    assert len(cse(trace).ops) == 4


def test_ops_in_a_checkpoint_are_never_merged():
    assert ops_after_cse(forward(
        """
        %a: f32[2, 3] = aten.sin.default(%x)  # [recompute]
        %b: f32[2, 3] = aten.sin.default(%x)  # [recompute]
        %y: f32[2, 3] = aten.sub.Tensor(%a, %b)
        """, "%y",
    )) == 3


def test_opaque_collective_and_claimed_ops_are_never_merged():
    for tag in ("opaque", "collective", "claimed"):
        text = forward(
            f"""
            %a: f32[2, 3] = aten.sin.default(%x)  # [{tag}]
            %b: f32[2, 3] = aten.sin.default(%x)  # [{tag}]
            %y: f32[2, 3] = aten.sub.Tensor(%a, %b)
            """, "%y",
        )
        assert ops_after_cse(text) == 3, tag


def test_writes_are_never_merged():
    assert ops_after_cse(forward(
        """
        %a: f32[2, 3] = aten.add_.Tensor(%x, 1)  # [mutates] writes(%x)
        %b: f32[2, 3] = aten.add_.Tensor(%x, 1)  # [mutates] writes(%x)
        """, "%a",
    )) == 2


def test_nothing_is_merged_across_the_phase_boundary():
    trace = parse(
        """
        trace (%x: f32[2, 3]) {
          fw:
            %y: f32[2, 3] = aten.sin.default(%x)
            %c: f32[2, 3] = aten.cos.default(%x)
            %z: f32[2, 3] = aten.mul.Tensor(%y, %c)
          bw:
            %g: f32[2, 3] = get_grad(%z, 0)  # [get_grad]
            %d: f32[2, 3] = aten.cos.default(%x)
            %dx: f32[2, 3] = aten.mul.Tensor(%g, %d)
          return (%z) grads (%dx)
        }
        """
    )
    assert len(cse(trace).ops) == 6


def test_two_equal_outputs_stay_two_tensors():
    text = forward(
        """
        %a: f32[2, 3] = aten.sin.default(%x)
        %b: f32[2, 3] = aten.sin.default(%x)
        """, "%a, %b",
    )
    assert ops_after_cse(text) == 2


def test_views_of_equal_values_that_are_returned_keep_their_own_memory():
    text = forward(
        """
        %a: f32[2, 3] = aten.sin.default(%x)
        %b: f32[2, 3] = aten.sin.default(%x)
        %v: f32[3, 2] = aten.t.default(%a)  # [view]
        %w: f32[3, 2] = aten.t.default(%b)  # [view]
        """, "%v, %w",
    )
    assert ops_after_cse(text) == 4


def test_gradients_of_two_inputs_keep_their_own_memory():
    trace = parse(
        """
        trace (%x: f32[2], %z: f32[2]) {
          fw:
            %y: f32[2] = aten.add.Tensor(%x, %z)
          bw:
            %g: f32[2] = get_grad(%y, 0)  # [get_grad]
            %dx: f32[2] = aten.neg.default(%g)
            %dz: f32[2] = aten.neg.default(%g)
          return (%y) grads (%dx, %dz)
        }
        """
    )
    assert len(cse(trace).ops) == 4


def test_what_may_be_read_before_and_after_a_write_is_not_merged():
    text = forward(
        """
        %o: f32[2, 3] = custom.op(%x)  # [opaque]
        %a: f32[2, 3] = aten.sin.default(%o)
        %w: f32[2, 3] = aten.add_.Tensor(%x, 1)  # [mutates] writes(%x)
        %b: f32[2, 3] = aten.sin.default(%o)
        %y: f32[2, 3] = aten.sub.Tensor(%a, %b)
        """, "%y",
    )
    assert len(cse(parse(text, {"custom.op": lambda x: x})).ops) == 5


def test_a_value_that_is_written_to_later_is_not_merged():
    text = forward(
        """
        %a: f32[2, 3] = aten.sin.default(%x)
        %b: f32[2, 3] = aten.sin.default(%x)
        %w: f32[2, 3] = aten.add_.Tensor(%a, 1)  # [mutates] writes(%a)
        %y: f32[2, 3] = aten.sub.Tensor(%w, %b)
        """, "%y",
    )
    assert ops_after_cse(text) == 4


def test_equal_views_that_nobody_writes_to_or_returns_are_merged():
    text = forward(
        """
        %a: f32[2, 3] = aten.sin.default(%x)
        %v: f32[3, 2] = aten.t.default(%a)  # [view]
        %w: f32[3, 2] = aten.t.default(%a)  # [view]
        %y: f32[3, 2] = aten.sub.Tensor(%v, %w)
        """, "%y",
    )
    assert ops_after_cse(text) == 3


def test_constants_that_compare_equal_but_differ_in_type_or_sign_are_kept_apart():
    text = forward(
        """
        %a: f32[2, 3] = aten.mul.Tensor(%x, 0.0)
        %b: f32[2, 3] = aten.mul.Tensor(%x, -0.0)
        %c: f32[2, 3] = aten.mul.Tensor(%x, 0)
        %y: f32[2, 3] = aten.cat.default([%a, %b, %c], 0)
        """, "%y",
    )
    assert ops_after_cse(text) == 4


def test_calls_that_name_different_results_of_their_op_are_kept_apart():
    text = forward(
        """
        (%a: f32[3], None) = aten.max.dim(%x, 0)
        (%b: f32[3], %i: i64[3]) = aten.max.dim(%x, 0)
        %y: f32[3] = aten.gather.default(%a, 0, %i)
        %z: f32[3] = aten.mul.Tensor(%y, %b)
        """, "%z",
    )
    assert len(cse(parse(text)).ops) == 4


@given(traces())
def test_cse_keeps_the_meaning_and_never_adds_ops(trace):
    text = str(trace)
    merged = cse(trace)
    assert_same_meaning(trace, merged)
    assert str(trace) == text
    assert len(merged.ops) <= len(trace.ops)
    assert cse(merged) == merged
