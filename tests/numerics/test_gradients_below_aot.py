"""The programs of `test_gradients` through the torch.compile front end."""
from __future__ import annotations

import inspect

import pytest
import torch
from numerics import test_gradients as programs
from numerics.oracle import assert_like_eager, compile_below_aot

TESTS = [(name, fn) for name, fn in vars(programs).items() if name.startswith("test_")]
CASES = [
    pytest.param(fn, {mark.args[0]: value}, id=f"{name}[{value}]")
    for name, fn in TESTS for mark in getattr(fn, "pytestmark", ()) for value in mark.args[1]
] + [pytest.param(fn, {}, id=name) for name, fn in TESTS if not inspect.signature(fn).parameters]


@pytest.mark.parametrize(("program", "arguments"), CASES)
def test_it_agrees_with_eager(program, arguments, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(programs, "jit", compile_below_aot)
    monkeypatch.setitem(assert_like_eager.__kwdefaults__, "compile_fn", compile_below_aot)
    program(**arguments)
