"""The text form of a trace: what it looks like, and that it reads back as what was printed."""
from __future__ import annotations

import collections
import enum
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from strategies import aten, call, get_grad, traces

from jointtrace.errors import ParseError
from jointtrace.ir.names import DTYPES
from jointtrace.ir.op import ObjectType, Op, Phase, ScalarType, Source, Symbol, Tag, Target, TensorType, Var
from jointtrace.ir.text import canonical, constants, parse, print_op, print_type
from jointtrace.ir.trace import Trace

F23 = TensorType((2, 3), torch.float32)
Pair = collections.namedtuple("Pair", "left right")


class Items(list):
    """A list that is not only a list, as graphs of torch hold."""


class Number(enum.IntEnum):
    """An int that is not only an int."""

    ONE = 1


def model_trace() -> Trace:
    line = Source("model.py", 12, "blocks.0.mlp")
    mul, view = Var("mul"), Var("view")
    return Trace(
        inputs=("x", "w"),
        ops=(
            call(aten.mul.Tensor, Var("x"), Var("w"), out=mul, source=line),
            call(aten.view.default, mul, [6], out=view),
            call(aten.sum.dim_IntList, view, [0], keepdim=True, dtype=torch.float64, out=Var("total")),
            call(aten.rand_like.default, view, out=Var("noise"), source=Source("model.py", 13)),
            call(aten.copy_.default, Var("x"), mul, out=Var("x_1")),
            get_grad("view", 0, "g"),
            call(aten.view.default, Var("g"), [2, 3], out=Var("g_1"), phase=Phase.BW, source=line),
        ),
        outputs=(view, Var("total"), None),
        grads=(Var("g_1"), None),
        types={
            "x": TensorType((2, 3), torch.float32, strides=(3, 1)),
            "w": TensorType((Symbol("s0", 2), 3), torch.bfloat16, "cuda:0"),
            "mul": F23,
            "view": TensorType((6,), torch.float32),
            "total": TensorType((1,), torch.float64),
            "noise": TensorType((6,), torch.float32),
            "x_1": F23,
            "g": TensorType((6,), torch.float32),
            "g_1": F23,
        },
        by="build_joint",
        notes={"decompositions": "none"},
    )


def one_op(**fields) -> Trace:
    """A trace of one op with these fields."""
    return Trace(("x",), (Op(**{"target": Target("f"), "out": Var("y"), **fields}),), (), types={"x": F23, "y": F23})


def check_round_trip(trace: Trace) -> str:
    text = str(trace)
    again = parse(text, constants(trace))
    assert again == trace
    assert str(again) == text
    assert again.by == trace.by
    return text


def test_a_joint_trace_prints_one_op_a_line():
    text = check_round_trip(model_trace())
    assert_expected_inline(text, """\
trace (%x: f32[2, 3][3, 1], %w: bf16[s0=2, 3] cuda:0) by=build_joint notes={'decompositions': 'none'} {
  fw:
    %mul: f32[2, 3] = aten.mul.Tensor(%x, %w)  # model.py:12 (blocks.0.mlp)
    %view: f32[6] = aten.view.default(%mul, [6])  # [view]
    %total: f64[1] = aten.sum.dim_IntList(%view, [0], keepdim=True, dtype=torch.float64)
    %noise: f32[6] = aten.rand_like.default(%view)  # [random] model.py:13
    %x_1: f32[2, 3] = aten.copy_.default(%x, %mul)  # [mutates] writes(%x)
  bw:
    %g: f32[6] = get_grad(%view, 0)  # [get_grad]
    %g_1: f32[2, 3] = aten.view.default(%g, [2, 3])  # [view] model.py:12 (blocks.0.mlp)
  return (%view, %total, None) grads (%g_1, None)
}""")


def test_a_region_prints_its_body_below_the_call():
    body = Trace(("a",), (call(aten.sin.default, Var("a"), out=Var("b")),), (Var("b"),), types={"a": F23, "b": F23})
    op = Op(Target("eager_0_fw"), (Var("x"),), out=(Var("y"),), tags=frozenset({Tag.RECOMPUTE}), body=body)
    trace = Trace(("x",), (op,), (Var("y"),), types={"x": F23, "y": F23})
    text = check_round_trip(trace)
    assert_expected_inline(text, """\
trace (%x: f32[2, 3]) {
  fw:
    (%y: f32[2, 3],) = eager_0_fw(%x) with trace (%a: f32[2, 3]) {
      fw:
        %b: f32[2, 3] = aten.sin.default(%a)
      return (%b)
    }  # [recompute]
  return (%y)
}""")


def test_branches_among_the_arguments_print_as_traces():
    branch = Trace(("a",), (), (Var("a"),), types={"a": F23})
    check_round_trip(one_op(args=(Var("x"), branch, [branch])))


def test_objects_without_a_literal_form_stand_in_a_table():
    weight, hook = torch.ones(2), print
    trace = one_op(args=(weight, [hook], weight, Pair(Var("x"), 1)))
    text = check_round_trip(trace)
    assert list(constants(trace)) == ["$0", "$1", "$2"]
    assert all(found is given for found, given in zip(constants(trace).values(), (weight, hook, Pair), strict=True))
    assert "f($0<Tensor>, [$1<print>], $0<Tensor>, $2<Pair>(%x, 1))" in text


def test_a_constant_that_the_table_lacks_is_named():
    with pytest.raises(ParseError, match=r"^line 3, column 23: expected an entry '\$0' in the table of constants"):
        parse(str(one_op(args=(object(),))))


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, ..., 0, 1, -7, 10**40, 1.0, -0.0, 0.0, 1e-300, 1e16, math.inf, -math.inf, math.nan,
        1 + 2j, complex(-0.0, math.nan), "", "a", "it's \"quoted\"", "two\nlines\ttab\\", "\u2028 é \ud800", "%x", "$0",
        "None", "# no comment", b"", b"\x00'\"\n", torch.float32, torch.float8_e4m3fn, torch.device("cuda:1"),
        torch.device("meta"), torch.strided, torch.sparse_coo, torch.channels_last, torch.preserve_format,
        (), (1,), (1, 2), [], [1], [None, [2.0]], {}, {"a": Var("x"), 2: (Var("x"),), None: {}}, torch.Size([2, 3]),
        slice(None, Var("x"), -1), slice(None), Symbol("s0", 4), Symbol("2*s0 + 1", 9), Var("x"), [Var("x"), Var("x")],
        Number.ONE, Pair(Var("x"), [1]), Items([Var("x"), 2]), collections.OrderedDict(a=Var("x")), object(), int,
        torch.ones(2), torch.Generator(), torch.finfo(torch.float32), torch.per_tensor_affine,
    ],
    ids=lambda value: repr(value).split(" at 0x")[0],
)  # fmt: skip
def test_every_constant_reads_back(value):
    trace = one_op(args=(value, (value,)), kwargs={"key": [value]})
    check_round_trip(trace)
    (op,) = parse(str(trace), constants(trace)).ops
    assert type(op.args[0]) is type(value)
    outputs = Trace((), (), (value, value))
    check_round_trip(outputs)


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ("1", 1), (1.0, 1 + 0j)])
def test_constants_that_print_differently_make_different_traces(one, other):
    assert one_op(args=(one,)) != one_op(args=(other,))
    assert str(one_op(args=(one,))) != str(one_op(args=(other,)))


def test_tensors_are_equal_constants_only_where_they_are_one_object():
    one, other = torch.ones(2), torch.ones(2)
    assert one_op(args=(one,)) == one_op(args=(one,))
    assert one_op(args=(one,)) != one_op(args=(other,))


names = st.text(min_size=1) | st.sampled_from(
    ["fw", "bw", "return", "trace", "with", "types", "None", "a.b", "1", "-", "$0", "torch.float32", "writes", "symbol"]
)
sizes = st.integers(0, 9) | st.builds(Symbol, names, st.integers(0, 9))
shapes = st.lists(sizes, max_size=3).map(tuple)
types = st.one_of(
    st.builds(TensorType, shapes, st.sampled_from(list(DTYPES.values())), names, st.none() | shapes),
    st.builds(ScalarType, st.sampled_from(["int", "float", "bool", "complex"]) | names),
    st.builds(ObjectType, st.just("object") | names),
)
constant = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(), st.binary())
keys = st.text() | st.integers() | st.booleans()
trees = st.recursive(
    constant | st.builds(Var, names),
    lambda tree: st.lists(tree, max_size=3)
    | st.lists(tree, max_size=3).map(tuple)
    | st.dictionaries(keys, tree, max_size=2),
    max_leaves=6,
)
outs = st.none() | st.builds(Var, names) | st.lists(st.none() | st.builds(Var, names), max_size=3).map(tuple)


@st.composite
def any_traces(draw, depth=1):
    """Traces that need not be valid: whatever the dataclasses hold."""
    ops = st.builds(
        Op,
        st.builds(Target, names),
        st.lists(trees, max_size=3).map(tuple),
        st.dictionaries(names, trees, max_size=2),
        outs,
        st.frozensets(st.sampled_from(Tag)),
        st.sampled_from(Phase),
        st.lists(names, max_size=2).map(tuple),
        st.none() | st.builds(Source, names, st.integers(0, 99), st.just("") | names),
        any_traces(depth=depth - 1) if depth and draw(st.booleans()) else st.none(),
    )
    grads = st.lists(st.none() | st.builds(Var, names), max_size=2).map(tuple)
    return Trace(
        inputs=draw(st.lists(names, max_size=2).map(tuple)),
        ops=draw(st.lists(ops, max_size=3)),
        outputs=draw(st.lists(trees, max_size=2).map(tuple)),
        grads=draw(grads),
        types=draw(st.dictionaries(names, types, max_size=3)),
        by=draw(st.just("") | names),
        notes=draw(st.dictionaries(names, st.text(), max_size=1)),
    )


@given(any_traces())
def test_whatever_the_dataclasses_hold_reads_back(trace):
    check_round_trip(trace)


@given(traces())
def test_a_trace_that_was_read_back_calls_the_same_operators(trace):
    again = parse(check_round_trip(trace))
    assert [op.target.fn for op in again.ops] == [op.target.fn for op in trace.ops]
    assert dict(again.types) == dict(trace.types)


def test_targets_are_resolved_from_the_table_first():
    table = {"aten.sin.default": aten.cos.default, "my.function": print}
    names = ("aten.sin.default", "my.function", "aten.cos.default", "aten.no.such")
    trace = Trace((), [Op(Target(name)) for name in names], ())
    found = [op.target.fn for op in parse(str(trace), table).ops]
    assert found == [aten.cos.default, print, aten.cos.default, None]


def test_symbols_keep_their_hint():
    trace = Trace(("x",), (), (), types={"x": TensorType((Symbol("s0", 7),), torch.int64, strides=(Symbol("s1", 5),))})
    found = parse(str(trace)).types["x"]
    assert (found.shape[0].hint, found.strides[0].hint) == (7, 5)


def test_every_dtype_has_its_own_short_name():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert set(DTYPES.values()) == dtypes
    known = (torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn)
    assert [print_type(TensorType((), dtype)) for dtype in known] == ["bf16[]", "b8[]", "i64[]", "f8e4m3fn[]"]


def test_one_op_prints_alone():
    op = model_trace().ops[4]
    assert print_op(op) == "%x_1 = aten.copy_.default(%x, %mul)  # [mutates] writes(%x)"
    assert print_op(op, model_trace()).startswith("%x_1: f32[2, 3] = ")


def test_comments_and_empty_lines_are_skipped():
    lines = str(model_trace()).splitlines()
    loose = "\n\n  # a comment % ' [\n".join(["# first", *lines, ""])
    assert parse(loose) == model_trace()


def every_tag() -> Trace:
    return one_op(args=(torch.ones(2), Items([object()]), print, Number.ONE), tags=frozenset(Tag))


def test_another_process_prints_the_same_text():
    tests = Path(__file__).parent
    program = "import sys; sys.path[:0] = sys.argv[1:]; import test_text; print(test_text.every_tag())"
    command = [sys.executable, "-c", program, str(tests), str(tests.parent)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert found == f"{every_tag()}\n"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("", "line 1, column 1: expected `trace`, found the end of the text"),
        ("trace (x) {", "line 1, column 8: expected `%`, found x"),
        ("trace (%x: f33[2]) {", "line 1, column 12: expected a type, as f32[2, 3], found f33"),
        ("trace (%x: f32[2 3]) {", "line 1, column 18: expected `,` or `]`, found 3"),
        ("trace (%x: f32[s0]) {", "line 1, column 18: expected `=` and the size seen, found ]"),
        ("trace () {\n  return ()", "line 2, column 12: expected the end of the line, found the end of the text"),
        ("trace () {\n  %y = f(%x)", "line 2, column 3: expected `fw:`, `bw:` or `return`, found %"),
        ("trace () {\n  return ()\n}\nmore", "line 4, column 1: expected the end of the text, found more"),
    ],
)
def test_text_that_is_no_trace_is_refused_with_line_and_column(broken, message):
    with pytest.raises(ParseError) as caught:
        parse(broken)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%y = f(%x", "column 10: expected `,` or `)`, found the end of the line"),
        ("%y = f(a=1, 2)", "column 13: expected `name=value` after the first of them, found 2"),
        ("%y = f((%x))", "column 11: expected `,` in a tuple of one item, found )"),
        ("%y = f(nothing)", "column 8: expected a value or a constant, found nothing"),
        ("%y = f(range(3))", "column 8: expected a value or a constant, found range"),
        ("%y = f(:)", "column 8: expected a value or a constant, found :"),
        ("%y = f('a)", "column 8: expected a closing quote"),
        ("%y = with(%x)", "column 6: expected the name of a target, found with"),
        ("%y = f()  # [hot]", "column 14: expected a tag (random, mutates"),
        ("%y = f()  # a.py", "column 17: expected `:`, found the end of the line"),
        ("%y = f()  # a.py:x", "column 18: expected an integer, found x"),
        ("%y = f() %x", "column 10: expected the end of the line, found %"),
    ],
)
def test_an_op_that_cannot_be_read_is_refused_with_its_line_and_column(line, message):
    with pytest.raises(ParseError) as caught:
        parse(f"trace (%x) {{\nfw:\n{line}\nreturn ()\n}}\n")
    assert str(caught.value).startswith(f"line 3, {message}")


def test_canonical_text_ignores_names_sources_and_size_hints():
    def body(x: str, y: str, line: int, hint: int) -> Trace:
        type_ = TensorType((Symbol("s0", hint),), torch.float32)
        op = call(aten.sin.default, Var(x), out=Var(y), source=Source("model.py", line, f"blocks.{line}"))
        return Trace((x,), (op,), (Var(y),), types={x: type_, y: type_}, by=f"pass{line}")

    assert canonical(body("x", "y", 1, 2)) == canonical(body("y", "a", 9, 3))
    assert_expected_inline(canonical(body("x", "y", 1, 2)), """\
trace (%v0: f32[s0]) {
  fw:
    %v1: f32[s0] = aten.sin.default(%v0)
  return (%v1)
}""")


def test_canonical_text_numbers_the_values_of_a_body_by_themselves():
    def nested(*names: str) -> str:
        x, y, z, a, b = names
        body = Trace((a,), (call(aten.sin.default, Var(a), out=Var(b)),), (Var(b),), types={a: F23, b: F23})
        region = Op(Target("region"), (Var(x),), out=(Var(y),), body=body)
        last = call(aten.mul.Tensor, Var(x), Var(y), out=Var(z))
        return canonical(Trace((x,), (region, last), (Var(z),), types={x: F23, y: F23, z: F23}))

    assert nested("x", "y", "z", "a", "b") == nested("x", "y", "z", "x", "y") == nested("x", "y", "z", "z", "x")


@given(traces())
def test_canonical_text_differs_where_two_values_are_swapped(trace):
    binary = [op for op in trace.ops if len(set(op.ins)) == 2 and not op.writes]
    for op in binary:
        first, second = dict.fromkeys(op.ins)
        swapped = op.rename_inputs({first: second, second: first})
        other = trace.rebuild([swapped if item is op else item for item in trace.ops], by="swap")
        assert canonical(other) != canonical(trace)
