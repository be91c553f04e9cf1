"""Reports: what they say is what ran."""
from __future__ import annotations

import pytest
import thunder
import torch
import torch.nn.functional as F
from numerics.oracle import jit, leaf
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import jointtrace
from jointtrace import pipeline
from jointtrace.errors import OptionError, UnsupportedError


def kept_bytes(compiled, *args, parameters=()):
    """Return the bytes of memory that one call keeps for its backward, besides the arguments."""
    owned = {t.untyped_storage().data_ptr() for t in (*args, *parameters)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = compiled(*args)
    del out
    return sum(kept.values())


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def written(x, w):
    y = torch.sin(x)
    y[1:].mul_(w[1:])
    return y.cos()


@pytest.mark.parametrize("executor", ["eager", "torch_compile"])
@pytest.mark.parametrize(("program", "count"), [
    (lambda x: (lambda y: (y[1:].sin() * y[:-1].cos()).t() * 2)(x.exp()), 1),
    (lambda x: F.dropout(x.sin(), 0.5), 1),
    (lambda x, w: (x.sum(0).expand(5, 5) * w).sin(), 2),
    (lambda x: x.exp(), 1),
    (lambda x: x.sin().t().reshape(-1).exp().sin(), 1),
    (lambda x: checkpoint(lambda a: a.sin().cos().exp(), x, use_reentrant=False), 1),
    (written, 2),
], ids=["views", "dropout", "expanded", "output", "copying reshape", "checkpoint", "in place"])
def test_saved_bytes_are_what_the_forward_keeps(program, count, executor):
    compiled = jit(program, executor)
    args = [leaf(5, 5) for _ in range(count)]
    assert kept_bytes(compiled, *args) == jointtrace.report(compiled).saved_bytes


def test_saved_bytes_of_a_module_leave_out_its_parameters():
    model = mlp()
    compiled, x = jit(model), leaf(6, 8)
    assert kept_bytes(compiled, x, parameters=model.parameters()) == jointtrace.report(compiled).saved_bytes > 0
    rows = {s.name: s for s in jointtrace.report(compiled).saved}
    assert rows["t_0_weight"].is_input
    (gelu,) = (s for s in rows.values() if s.made_by.endswith("gelu"))
    assert (gelu.shape, gelu.dtype, gelu.nbytes, gelu.source.file) == ((6, 16), "float32", 384, "activation.py")


def test_calls_of_each_region_are_counted():
    compiled, x = jit(lambda x: torch.sin(x) * torch.cos(x), "torch_compile"), leaf(3)
    out = compiled(x)
    assert [(r.phase, r.executor, r.calls) for r in jointtrace.report(compiled).regions] == [
        ("fw", "torch_compile", 1), ("bw", "torch_compile", 0)]
    assert "NEVER RAN" in str(jointtrace.report(compiled))
    out.sum().backward()
    compiled(x)
    assert [r.calls for r in jointtrace.report(compiled).regions] == [2, 1]
    assert "NEVER RAN" not in str(jointtrace.report(compiled))


def test_what_runs_eagerly_has_its_reason():
    def program(x, counter):
        counter.add_(1)
        return torch.sin(x) * 2

    (row,) = _report(program, "torch_compile", leaf(3), torch.zeros(1)).eager
    assert (row.target, row.phase, row.count, row.reason) == ("Tensor.copy_", "fw", 1, "it writes in place")
    (row,) = _report(torch.sin, "torch_compile", torch.randn(3)).eager
    assert row.reason == "it is too little to compile"
    (row,) = _report(torch.sin, "eager", torch.randn(3)).eager
    assert row.reason == "no executor that fuses was asked"


def test_an_op_that_no_executor_can_fuse_is_said_to_be_so():
    # Inductor has no code for complex numbers
    def program(x):
        return torch.view_as_real(torch.view_as_complex(x) * 2j) + 1

    report = _report(program, "torch_compile", torch.randn(3, 2))
    assert {e.reason for e in report.eager if "complex" in e.target} == {"torch_compile cannot run it"}


def test_each_compilation_is_reported_and_the_last_stands_for_all():
    compiled = jit(lambda x: torch.sin(x))
    compiled(leaf(3))
    compiled(leaf(2, 4))
    report = jointtrace.report(compiled)
    assert [c.saved[0].shape for c in report.compilations] == [(3,), (2, 4)]
    assert report.saved == report.compilations[1].saved
    assert str(report).count("thunder front end") == 2


def test_passes_are_reported_in_order_with_time_and_size():
    passes = _report(mlp(), "eager", leaf(6, 8)).passes
    assert [p.name for p in passes] == [
        "build_joint", *(name for name, _ in pipeline.PASSES), "split_forward", "split_backward", "dce_forward",
        "dce_backward"]
    assert all(p.ops == len(p.trace.ops) for p in passes)
    assert passes[0].seconds > 0


def test_a_compilation_that_failed_is_reported_as_such():
    options = {"executors": ("eager",), "memory_budget": 2}  # bytes
    compiled = thunder.jit(lambda x: torch.sin(x), delay_trace_split=True, jointtrace=options)
    with pytest.raises(UnsupportedError, match="memory_budget=2"):
        compiled(leaf(3))
    report = jointtrace.report(compiled)
    assert not report.last.finished
    assert "did not finish" in str(report)
    assert report.memory is None


@pytest.mark.parametrize("make", [lambda fn: fn, thunder.jit, jit], ids=["not compiled", "by thunder", "not called"])
def test_a_function_without_a_compilation_has_no_report(make):
    fn = make(lambda x: x)
    with pytest.raises(OptionError, match=r"not compiled by jointtrace, or has not been called yet; compile it with"):
        jointtrace.report(fn)


def _report(program, executor, *args):
    compiled = jit(program, executor)
    compiled(*args)
    return jointtrace.report(compiled)
