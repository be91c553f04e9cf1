"""Records of torch.compile: found from whatever the user holds, and gone with the code they describe."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from numerics.oracle import leaf
from torch import nn

import jointtrace
from jointtrace.errors import OptionError
from jointtrace.reporting.registry import find

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo, at graph breaks
EAGER = {"executors": ("eager",)}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    gc.collect()  # compiled code is part of cycles
    yield
    torch._dynamo.reset()


def compiled(fn, **options):
    return torch.compile(fn, backend="jointtrace", options=EAGER, **options)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sin()


class Broken(nn.Module):
    def forward(self, x):
        y = halved(x.sin())
        torch._dynamo.graph_break()
        return y.cos().exp()


def halved(x):
    y = x.exp()
    torch._dynamo.graph_break()
    return y.sin() / 2


def test_a_compiled_module_and_the_module_it_was_made_of_have_one_record():
    model = Scaled()
    step = compiled(model)
    step(leaf(2, 4)).sum().backward()
    (record,) = find(step)
    assert find(model) == find(model.forward) == [record]
    assert record.halves.backward is not None


def test_a_module_compiled_in_place_has_its_record():
    model = Scaled()
    model.compile(backend="jointtrace", options=EAGER)
    model(leaf(2, 4))
    assert len(find(model)) == 1


def test_a_module_of_torchs_own_has_its_record():
    first, second = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.GELU())
    for model in (first, second):
        compiled(model)(leaf(2, 4))
    assert [len(find(model)) for model in (first, second)] == [1, 1]
    assert find(first) != find(second)


def test_functions_methods_and_callable_objects_have_their_records():
    class Machine:
        def __call__(self, x):
            return x.sin()

        def step(self, x):
            return x.cos()

    def function(x):
        return x.exp()

    machine = Machine()
    for original in (function, machine, machine.step, torch.tan):
        step = compiled(original)
        step(leaf(3))
        (record,) = find(step)
        assert find(original) == [record]


def test_what_is_resumed_after_a_graph_break_and_what_is_called_there_belong_to_the_original():
    model = Broken()
    compiled(model)(leaf(3)).sum().backward()
    origins = [record.origin for record in find(model)]
    assert [(o.function, o.resumed) for o in origins] == [
        ("forward", False), ("halved", False), ("halved", True), ("forward", True)]
    assert [bool(o.ends) for o in origins] == [True, True, False, False]


def test_instances_of_one_class_have_their_own_records():
    first, second = Scaled(), Scaled()
    torch.compile(first, backend="jointtrace", options=EAGER)(leaf(2, 4))
    torch.compile(second, backend="jointtrace", options={**EAGER, "disable": ("cse",)})(leaf(2, 4))
    (one,), (other,) = find(first), find(second)
    assert (one.options.disable, other.options.disable) == ((), ("cse",))


def test_an_instance_that_runs_what_dynamo_compiled_for_another_finds_its_record():
    first, second = Scaled(), Scaled()
    for model in (first, second):
        compiled(model)(leaf(2, 4))
    assert [r.origin for r in find(second)] == [r.origin for r in find(first)]
    assert len(find(first)) == 1


def test_a_record_goes_with_the_code_that_dynamo_drops():
    model = Scaled()
    compiled(model)(leaf(2, 4)).sum().backward()
    record = weakref.ref(find(model)[0])
    torch._dynamo.reset()
    gc.collect()
    assert record() is None
    assert find(model) == []


def test_a_compilation_that_failed_is_found_and_goes_with_its_module(monkeypatch):
    def broken(trace, *_):
        raise RuntimeError("broken")

    monkeypatch.setattr("jointtrace.frontends.aot.compile_trace", broken)
    model = Scaled()
    with pytest.raises(Exception, match="broken"):
        compiled(model)(leaf(2, 4))
    (record,) = find(model)
    assert not jointtrace.report(model).last.finished or record.stages
    gone = weakref.ref(record)
    del record, model
    gc.collect()
    assert gone() is None


def test_what_was_never_called_has_no_report():
    with pytest.raises(OptionError, match="has not been called yet"):
        jointtrace.report(compiled(Scaled()))


def test_other_compilers_of_the_same_code_are_no_records():
    model = Scaled()
    torch.compile(model, backend="eager")(leaf(2, 4))
    assert find(model) == []
