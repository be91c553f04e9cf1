from __future__ import annotations

import collections
import gc
import linecache
import math
import traceback
import weakref

import pytest
import torch
from hypothesis import given

from jointtrace.errors import VerifyError
from jointtrace.ir.op import Op, Source, Tag, Target, Var
from jointtrace.ir.trace import Trace
from jointtrace.runtime.codegen import compile_trace, python_source
from tests.strategies import run, sample_inputs, traces

Pair = collections.namedtuple("Pair", ["left", "right"])


def op(fn, *args, out, name=None, **kwargs):
    return Op(Target(name or fn.__name__, fn), args, kwargs, out)


def traced(*ops, inputs=("x",), outputs=("y",)):
    return Trace(inputs, ops, tuple(Var(name) for name in outputs))


def call_with(*args, **kwargs):
    """The arguments as an op with these in its tree gets them."""
    got = []

    def probe(*a, **k):
        got.append((a, k))

    compile_trace(traced(op(probe, *args, **kwargs, out=None), outputs=()))([3.0])
    return got[0]


class Watched:
    """Something a weak reference can follow."""


@given(traces(random=False))
def test_the_function_computes_what_the_trace_says(trace):
    forward = Trace(trace.inputs, trace.ops[: trace.boundary], trace.outputs, types=trace.types)
    expected, _ = run(forward, sample_inputs(trace))
    actual = compile_trace(forward)(sample_inputs(trace))
    torch.testing.assert_close(list(actual), expected, rtol=0, atol=0, equal_nan=True)


def test_the_source_is_plain_python_with_the_names_of_the_values():
    trace = traced(
        op(torch.mul, Var("x"), 2.0, out=Var("a"), name="aten.mul.Tensor"),
        op(torch.split, Var("a"), [1, 2], dim=0, out=[Var("b"), None]).replace(source=Source("model.py", 3, "mlp")),
        op(torch.sum, Var("b"), dtype=torch.float64, out=Var("y")),
    )
    assert python_source(trace, "step")[0] == (
        "def step(args):\n"
        "    [x] = args\n"
        "    args.clear()\n"
        "    a = aten_mul_Tensor(x, 2.0)\n"
        "    del x\n"
        "    b, unused = split(a, [1, 2], dim=0)  # model.py:3 (mlp)\n"
        "    del unused, a\n"
        "    y = sum(b, dtype=torch.float64)\n"
        "    del b\n"
        "    return (y,)\n"
    )


def test_the_list_of_arguments_is_emptied():
    args = [1.0]
    compile_trace(traced(op(math.sqrt, Var("x"), out=Var("y"))))(args)
    assert args == []


def test_the_positional_form_takes_the_inputs_one_by_one():
    trace = traced(op(math.pow, Var("x"), Var("w"), out=Var("y")), inputs=("x", "w"))
    assert compile_trace(trace, boxed=False)(2.0, 3.0) == (8.0,)


def test_a_value_dies_before_the_op_after_its_last_use():
    alive = []
    refs = []

    def make():
        made = Watched()
        refs.append(weakref.ref(made))
        return made

    def look(_):
        alive.append([ref() is not None for ref in refs])
        return Watched()

    trace = traced(
        op(make, out=Var("a")), op(look, Var("a"), out=Var("b")), op(look, Var("b"), out=Var("c")),
        op(look, Var("c"), out=Var("y")), inputs=(),
    )
    compile_trace(trace)([])
    assert alive == [[True], [False], [False]]


def test_an_argument_dies_at_its_last_use_though_the_caller_gave_it_in_a_list():
    alive = []

    def look(ref):
        alive.append(ref() is not None)

    watched = Watched()
    trace = traced(
        op(weakref.ref, Var("x"), out=Var("r")), op(look, Var("r"), out=None), inputs=("x",), outputs=("r",)
    )
    args = [watched]
    del watched
    compile_trace(trace)(args)
    assert alive == [False]


def test_an_argument_that_is_never_read_dies_at_once():
    watched = Watched()
    ref = weakref.ref(watched)
    args = [watched]
    del watched
    assert compile_trace(traced(op(lambda: ref() is None, out=Var("y"), name="gone")))(args) == (True,)


def test_a_result_that_is_never_read_dies_at_once():
    refs = []

    def make():
        pair = (Watched(), Watched(), Watched())
        refs.extend(map(weakref.ref, pair))
        return pair

    def look():
        return [ref() is None for ref in refs]

    trace = traced(op(make, out=(Var("a"), None, Var("b"))), op(look, out=Var("y")), inputs=(), outputs=("y", "b"))
    assert compile_trace(trace)([])[0] == [True, True, False]


def region(fn, *args, out):
    return op(fn, *args, out=out).replace(body=Trace((), (), ()))


def test_a_region_can_free_its_arguments_while_it_runs():
    def block(*args):
        raise AssertionError("called with arguments that cannot be freed")

    def boxed(args):
        refs = [weakref.ref(a) for a in args]
        args.clear()
        return tuple(ref() is None for ref in refs)

    block.boxed = boxed
    trace = traced(
        op(Watched, out=Var("a")), op(Watched, out=Var("b")),
        region(block, Var("a"), Var("b"), out=(Var("y"), Var("z"))),
        inputs=(), outputs=("y", "z", "b"),
    )
    assert compile_trace(trace)([])[:2] == (True, False)


def test_a_region_without_a_boxed_form_is_called_as_any_op():
    trace = traced(region(lambda a, b: (a + b,), Var("x"), Var("x"), out=(Var("y"),)))
    assert compile_trace(trace)([2]) == (4,)


def test_results_in_a_dict_are_taken_apart():
    trace = traced(
        op(lambda: {"a": 1, "b": (2, 3)}, out={"a": Var("y"), "b": (None, Var("z"))}, name="make"),
        inputs=(), outputs=("y", "z"),
    )
    assert compile_trace(trace)([]) == (1, 3)


def test_results_in_nested_tuples_are_taken_apart():
    trace = traced(op(lambda: (1, (2, [3])), out=(None, (Var("y"), [Var("z")])), name="make"), inputs=(), outputs="yz")
    assert compile_trace(trace)([]) == (2, 3)


@pytest.mark.parametrize("constant", [
    1, True, None, "it's\n", 0.1, -0.0, math.inf, -math.inf, 1 + 2j, ..., b"bytes", torch.float32, torch.device("cpu"),
    torch.strided, torch.channels_last, (1,), (), [], {}, {"a": [1, (2,)]}, slice(1, None, 2), Pair(1, [2]), torch.add,
], ids=lambda value: repr(value).split(" at 0x")[0])
def test_a_constant_arrives_as_it_is(constant):
    (arrived,), _ = call_with(constant)
    assert arrived == constant
    assert type(arrived) is type(constant)
    assert repr(arrived) == repr(constant)


def test_nan_arrives():
    (arrived,), _ = call_with(math.nan)
    assert math.isnan(arrived)


def test_a_tensor_constant_arrives_as_the_same_object():
    constant = torch.ones(2)
    (arrived,), _ = call_with(constant)
    assert arrived is constant


def test_values_inside_trees_are_replaced():
    assert call_with([Var("x"), (Var("x"), 1)], key={"a": slice(Var("x"), 2)}) == (
        ([3.0, (3.0, 1)],), {"key": {"a": slice(3.0, 2)}}
    )


def test_keywords_that_are_no_names_arrive():
    assert call_with(**{"lambda": 1, "a b": Var("x")}) == ((), {"lambda": 1, "a b": 3.0})


@pytest.mark.parametrize("name", ["args", "lambda", "1", "a.b", "torch", "abs", "region_args", "print", "é", "forward"])
def test_any_name_of_a_value_works(name):
    trace = traced(op(abs, Var(name), dtype=torch.int8, out=Var("y"), name="abs"), inputs=(name,))
    ops = [trace.ops[0].replace(kwargs={}), op(lambda y, d: y, Var("y"), torch.int8, out=Var("z"))]
    trace = trace.rebuild(ops, by="")
    assert compile_trace(trace)([-2]) == (2,)


def test_a_value_called_slice_does_not_hide_pythons():
    trace = traced(op(lambda x, s: x[s], Var("slice"), slice(1, 2), out=Var("y"), name="take"), inputs=("slice",))
    assert compile_trace(trace)([[1, 2, 3]]) == ([2],)


def test_names_that_look_alike_stay_apart():
    trace = traced(op(lambda a, b: a - b, Var("a.b"), Var("a_b"), out=Var("y"), name="a_b"), inputs=("a.b", "a_b"))
    assert compile_trace(trace)([5, 3]) == (2,)


def test_two_functions_of_one_name_stay_apart():
    trace = traced(
        op(lambda x: x + 1, Var("x"), out=Var("a"), name="f"), op(lambda x: x * 10, Var("a"), out=Var("y"), name="f")
    )
    assert compile_trace(trace)([1]) == (20,)


def test_outputs_may_be_inputs_constants_and_repeated():
    trace = Trace(("x",), (), (Var("x"), 3, Var("x"), None, torch.float32))
    assert compile_trace(trace)([7]) == (7, 3, 7, None, torch.float32)


def test_a_trace_without_inputs_and_outputs_works():
    assert compile_trace(Trace((), (), ()))([]) == ()


def test_tracebacks_show_the_generated_line():
    def fails(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as info:
        compile_trace(traced(op(fails, Var("x"), out=Var("y"))))([1])
    assert "y = fails(x)" in "".join(traceback.format_tb(info.tb))


def test_a_function_that_is_gone_leaves_nothing_behind():
    fn = compile_trace(traced(op(abs, Var("x"), out=Var("y"))))
    filename, ref = fn.__code__.co_filename, weakref.ref(fn)
    assert filename in linecache.cache
    gc.disable()
    try:
        del fn
        assert ref() is None
    finally:
        gc.enable()
    assert filename not in linecache.cache


def test_an_op_without_a_callable_is_named():
    with pytest.raises(VerifyError, match="any_0_fw has no callable"):
        compile_trace(traced(Op(Target("any_0_fw"), (Var("x"),), out=Var("y"), tags=frozenset({Tag.VIEW}))))
