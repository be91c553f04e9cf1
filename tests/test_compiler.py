"""`jointtrace.compile`: the options are checked where they are given, and reach the compilation."""
from __future__ import annotations

import pytest
import torch
from numerics.oracle import assert_like_eager, leaf

import jointtrace
from jointtrace.errors import OptionError, UnsupportedError


@pytest.mark.parametrize(("options", "accepted"), [
    ({"budget": 1}, "unknown option 'budget'; accepted: executors, disable"),
    ({"executors": ("fast",)}, "unknown executor 'fast'"),
    ({"disable": "fusing"}, "accepted: group_get_grad"),
    ({"mode": "max-autotune"}, "accepted: default, max-autotune-no-cudagraphs"),
    ({"late_split": False}, "unknown option 'late_split'"),
])
def test_a_bad_option_is_refused_at_once(options, accepted):
    with pytest.raises(OptionError, match=accepted):
        jointtrace.compile(torch.sin, **options)


def test_an_executor_that_cannot_run_here_is_refused_at_once():
    if torch.cuda.is_available():
        pytest.skip("nvFuser may run here")
    with pytest.raises(UnsupportedError, match="'nvfuser' is unavailable"):
        jointtrace.compile(torch.sin, executors="nvfuser")


def test_a_module_is_compiled():
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.GELU())
    assert_like_eager(model, leaf(3, 4), compile_fn=lambda fn: jointtrace.compile(fn, executors="eager", dynamic=True))


def test_without_a_function_it_is_a_decorator():
    @jointtrace.compile(executors=("eager",), fullgraph=True)
    def broken(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        broken(leaf(3))


def test_it_stays_a_function_when_its_module_has_been_imported(python):
    found = python("import jointtrace.compiler, jointtrace; jointtrace.compile; print(callable(jointtrace.compile))")
    assert found.stdout.split() == ["True"]


def test_the_backend_is_found_without_an_import(python):
    found = python("import torch; double = torch.compile(lambda x: x * 2, backend='jointtrace', "
                   "options={'executors': 'eager'}); print(double(torch.ones(2)).tolist())")
    assert found.stdout.split() == ["[2.0,", "2.0]"]
