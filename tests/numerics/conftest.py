"""Each program runs through both front ends; one that is marked `also_fused` with regions compiled by Inductor too."""
from __future__ import annotations

import functools

import pytest
import torch
from numerics.oracle import assert_like_eager, assert_same_story, compile_below_aot, jit

FRONT_ENDS = {"thunder": jit, "dynamo": compile_below_aot}


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", "also_fused: runs with regions compiled by Inductor too")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of `compile_fn` with each front end, and executor."""
    if "compile_fn" in metafunc.fixturenames:
        executors = ["eager"] + ["torch_compile"] * bool(metafunc.definition.get_closest_marker("also_fused"))
        ways = [(front_end, executor) for executor in executors for front_end in FRONT_ENDS]
        metafunc.parametrize("compile_fn", ways, ids=["-".join(way) for way in ways], indirect=True)


@pytest.fixture
def compile_fn(request):
    """Return how to compile a function: the front end and the executor that the test is run with."""
    torch._dynamo.reset()
    front_end, executor = request.param
    return lambda fn, **options: FRONT_ENDS[front_end](fn, executor, **options)


@pytest.fixture
def like_eager(compile_fn):
    """Return `assert_like_eager` for the front end that the test is run with."""
    return functools.partial(assert_like_eager, compile_fn=compile_fn)


@pytest.fixture
def same_story(compile_fn):
    """Return `assert_same_story` for the front end that the test is run with."""
    return functools.partial(assert_same_story, compile_fn=compile_fn)
