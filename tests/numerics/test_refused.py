"""What lightning-thunder cannot trace is refused there with its line; through torch.compile all of it runs."""
from __future__ import annotations

import contextlib
import functools
import gc
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from numerics.oracle import assert_like_eager, compile_below_aot, jit, leaf

import jointtrace

LINE = r"test_refused\.py:\d+"


class Pair(NamedTuple):
    """Two results by name."""

    first: Any
    second: Any


@dataclass(frozen=True)
class Refused:
    """A program that thunder's front end refuses.

    Attributes:
        name: what it does.
        program: a function of one argument of shape (3,).
        match: what the error says.
        reason: why it is refused.
    """

    name: str
    program: Callable[[torch.Tensor], Any]
    match: str
    reason: str


def adds_in_place_to_a_boolean(x):
    mask = x > 0
    mask |= x < -1
    return x * mask


def normalizes_a_weight(x):
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2))
    return layer(x).shape[0] * x


def sorts_and_takes_values_by_name(x):
    return torch.sort(x * 2).values


def branches_on_a_value(x):
    return x * 2 if x.sum() > 0 else x * 3


GRU = torch.nn.GRU(3, 3)


REFUSED = (
    Refused("fill_", lambda x: (x * 2).fill_(3) + x, rf"{LINE}.*fill_", "thunder has no fill_"),
    Refused("t_", lambda x: x.view(1, 3).sin().t_(), rf"{LINE}.*t_", "thunder changes no shape in place"),
    Refused("unsqueeze_", lambda x: x.sin().unsqueeze_(0), rf"{LINE}.*unsqueeze_", "thunder changes no shape in place"),
    Refused("a branch on a value", branches_on_a_value, rf"{LINE}.*data dependency", "thunder has no graph breaks"),
    Refused("|=", adds_in_place_to_a_boolean, rf"{LINE}.*__ior__", "thunder has no in-place operators of bits"),
    Refused("a mask as an index", lambda x: x[x > -9] * 2, rf"{LINE}.*boolean advanced indexing", "unknown shape"),
    Refused("names of results", sorts_and_takes_values_by_name, rf"{LINE}.*values", "thunder's sort returns a tuple"),
    Refused("dropout in place", lambda x: F.dropout(x * 2, 0.0, inplace=True), "inplace=False", "thunder has none"),
    Refused("a named tuple as a result", lambda x: Pair(x * 2, x.sin()), rf"{LINE}.*Pair", "thunder cannot build one"),
    Refused("an ordered dict as a result", lambda x: OrderedDict(a=x * 2), rf"{LINE}.*OrderedDict",
            "thunder cannot take one apart"),
    Refused("vmap", lambda x: torch.vmap(torch.sin)(x), LINE, "thunder's interpreter cannot run it"),
    Refused("a gradient in the program", lambda x: torch.func.grad(lambda y: y.sin().sum())(x) * x, LINE,
            "thunder's tensors are none to functorch"),
    Refused("a backward in the program", lambda x: x.sin().sum().backward(), LINE,
            "thunder traces no backward"),
    Refused("a recurrent layer", lambda x: GRU(x.unsqueeze(0))[0], rf"{LINE}.*KeyError", "thunder knows none"),
)
NO_RESULT_TO_COMPARE = {"a backward in the program", "a recurrent layer"}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize("refused", REFUSED, ids=lambda r: r.name)
def test_thunder_refuses_it_with_its_line(refused):
    with pytest.raises(jointtrace.UnsupportedError, match=refused.match):
        jit(refused.program)(leaf(3))


@pytest.mark.parametrize("refused", [r for r in REFUSED if r.name not in NO_RESULT_TO_COMPARE], ids=lambda r: r.name)
def test_torch_compile_runs_it(refused):
    assert_like_eager(refused.program, leaf(3), compile_fn=compile_below_aot)


@pytest.mark.parametrize(("program", "error"), [
    (lambda x: {"a": x}["b"] if x.shape[0] == 2 else _raise(KeyError("mine")), KeyError),
    (lambda x: _raise(ValueError("mine")), ValueError),
], ids=["KeyError", "ValueError"])
def test_an_error_that_the_program_raises_stays_what_it_is(compile_fn, program, error):
    with pytest.raises(error, match="mine") as caught:
        compile_fn(program)(leaf(3))
    assert not isinstance(caught.value, jointtrace.UnsupportedError)


def _raise(error):
    raise error


def test_an_assertion_of_the_program_fails_as_in_eager(compile_fn):
    def program(x):
        assert x.shape[0] == 4, "four rows"
        return x.sin()

    with pytest.raises(AssertionError, match="four rows"):
        compile_fn(program)(leaf(3))


def test_the_line_is_that_of_the_innermost_function_of_the_program():
    def inner(x):
        return x.fill_(1)

    def outer(x):
        y = x * 2

        return inner(y)

    line = inner.__code__.co_firstlineno + 1
    with pytest.raises(jointtrace.UnsupportedError, match=rf"test_refused\.py:{line}\)"):
        jit(outer)(leaf(3))


def test_functional_programs_work_after_one_was_refused():
    with pytest.raises(jointtrace.UnsupportedError):
        jit(lambda x: torch.func.grad(lambda y: y.sin().sum())(x))(leaf(3))
    x = leaf(3)
    x.sin().sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_a_refused_function_compiles_for_arguments_it_can_be_traced_with():
    def program(x, fill):
        return x.sin().fill_(1) if fill else x.sin()

    compiled = jit(program)
    with pytest.raises(jointtrace.UnsupportedError, match="fill_"):
        compiled(leaf(3), True)
    assert_like_eager(program, leaf(3), False, compiled=compiled)


def test_what_thunder_refuses_without_the_option_is_left_to_thunder():
    import thunder

    with pytest.raises(AttributeError, match="fill_"):
        thunder.jit(lambda x: x.sin().fill_(1))(leaf(3))


def test_a_keyword_that_thunder_names_otherwise_is_refused():
    half = functools.partial(torch.mul, other=0.5)
    with pytest.raises(jointtrace.UnsupportedError, match="other"):
        jit(lambda x: half(x))(leaf(3))

@pytest.mark.parametrize("block", [
    torch.no_grad,
    torch.autograd.graph.save_on_cpu,
    lambda: torch.autograd.set_multithreading_enabled(False),
    torch._C.DisableTorchFunction,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
], ids=["no_grad", "save_on_cpu", "one thread", "no torch functions", "autocast", "no saved tensor hooks"])
@pytest.mark.parametrize("refused", [torch.vmap(torch.sin), torch.func.grad(lambda x: x.sin().sum())],
                         ids=["vmap", "grad"])
def test_a_block_in_which_thunder_gave_up_is_left(block, refused):
    def state():
        return (torch.is_grad_enabled(), torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
                torch._C._autograd._top_saved_tensors_default_hooks(True), torch.autograd.is_multithreading_enabled(),
                torch._C._is_torch_function_all_disabled(), torch.is_autocast_enabled("cpu"))

    def program(x):
        with block():
            return refused(x)

    before = state()
    with pytest.raises(jointtrace.UnsupportedError):
        jit(program)(leaf(3))
    assert state() == before


@pytest.mark.parametrize("program", [lambda x: _raise(ValueError("mine")), lambda x: x * ("three" * "four")],
                         ids=["the program's error", "a refusal"])
def test_an_error_keeps_no_tensor_alive(program):
    def run():
        x = leaf(3)
        with contextlib.suppress(ValueError, TypeError):
            jit(program)(x)
        return weakref.ref(x)

    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()


def test_a_refusal_shows_the_line_in_its_traceback():
    def program(x):
        return x * ("three" * "four")

    with pytest.raises(TypeError, match=LINE) as caught:
        jit(program)(leaf(3))
    assert '"three" * "four"' in "".join(traceback.format_tb(caught.value.__traceback__))
