"""check mode: faults planted in passes are found, with the pass and the op named."""
from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checking.planting import compiled_by, names_of, plant, renamed
from numerics.oracle import leaf, weighted_sum

from jointtrace import pipeline
from jointtrace.errors import CheckError
from jointtrace.frontends import aot
from jointtrace.ir.op import Phase, Tag, Var
from jointtrace.passes._copy import compute_again

BOTH = pytest.mark.parametrize("frontend", ["thunder", "dynamo"])


class Block(torch.nn.Module):
    """Normalised, gated and noisy: what a model has, small."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = (torch.nn.Linear(6, 6) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x):
        hidden = F.dropout(F.silu(self.gate(x)) * self.up(x), 0.4)
        return self.norm(x + self.down(hidden)), hidden.tanh()


def check_error(frontend, fn, *args, executor="eager"):
    """Run `fn` forward and backward in check mode and return the error; its script shows the fault again."""
    compiled = compiled_by(frontend, fn, executor)
    with pytest.raises(CheckError) as raised:
        weighted_sum(compiled(*args)).backward()
    with pytest.raises(SystemExit) as shown:
        runpy.run_path(str(raised.value.script), run_name="__main__")
    assert shown.value.code == 1, "the reproducer does not reproduce"
    return raised.value


def line_of(text):
    """Return the number of the first line of this file that holds `text`."""
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), start=1) if text in line)


@pytest.fixture(autouse=True)
def _scripts_go_to(tmp_path, monkeypatch):
    monkeypatch.setenv("JOINTTRACE_DUMP", str(tmp_path))


@BOTH
def test_a_merge_of_two_draws_by_cse_is_found(frontend, monkeypatch):
    def noisy(x):
        return x * torch.rand_like(x) + torch.rand_like(x)

    def merged(before, after):
        first, second = names_of(after, lambda op: Tag.RANDOM in op.tags)[:2]
        return renamed(after, {second: first}, lambda op: Tag.RANDOM not in op.tags)

    plant(monkeypatch, "cse", merged)
    error = check_error(frontend, noisy, leaf(3, 4))
    assert error.stage == "cse"
    assert "add" in error.op
    assert "before: " in str(error)


@BOTH
def test_a_merge_of_two_get_grads_by_cse_is_found(frontend, monkeypatch):
    def merged(before, after):
        first, second = names_of(after, lambda op: Tag.GET_GRAD in op.tags)
        return renamed(after, {second: first}, lambda op: Tag.GET_GRAD not in op.tags)

    plant(monkeypatch, "cse", merged)
    error = check_error(frontend, lambda x: (x.sin(), x.sin()), leaf(3))
    assert error.stage == "cse"
    assert "gradient of input" in str(error)


def test_a_needed_write_that_dce_drops_is_found(monkeypatch):
    plant(monkeypatch, "dce", lambda before, after: after.rebuild(
        [op for op in after.ops if not any("running_mean" in name for name in op.writes)], by="dce"))
    error = check_error("thunder", Block(), leaf(5, 6))
    assert error.stage == "dce"
    assert "copy_" in error.op
    assert "running_mean" in error.op
    assert "test_planted_faults.py:" in str(error)
    assert "this write is gone" in str(error)


@BOTH
def test_randomness_drawn_again_by_recompute_is_found(frontend, monkeypatch):
    def redrawn(before, after):
        drawn = set(names_of(before, lambda op: Tag.RANDOM in op.tags and op.phase is Phase.FW))
        for op in before.ops[: before.boundary]:
            if drawn.intersection(op.ins) and Tag.COMPUTE_BOUND not in op.tags:
                drawn.update(op.outs)
        return compute_again(before, drawn)

    plant(monkeypatch, "recompute", redrawn)
    error = check_error(frontend, Block(), leaf(5, 6))
    assert error.stage == "recompute"
    assert "%bw_" in error.op


@BOTH
def test_a_wrong_value_computed_again_is_found(frontend, monkeypatch):
    def wrong(before, after):
        (sigmoid, *_) = [op for op in after.ops if op.phase is Phase.BW and "sin" in op.target.name]
        other = next(name for name in before.inputs if name not in sigmoid.ins)
        return after.rebuild([op.rename_inputs({sigmoid.ins[0]: other}) if op is sigmoid else op for op in after.ops],
                             by="recompute")

    plant(monkeypatch, "recompute", lambda before, after: wrong(before, compute_again(
        before, set(names_of(before, lambda op: "sin" in op.target.name and op.phase is Phase.FW)))))
    error = check_error(frontend, lambda x, y: (x.sin() * y).exp(), leaf(4), leaf(4))
    assert error.stage == "recompute"
    assert "sin" in error.op


def test_memory_read_after_it_was_overwritten_is_found(monkeypatch):
    def overwritten(x, y):
        h = x * 2
        h.mul_(y)
        return h.sin()

    def careless(before, after):
        (copy,) = [op for op in after.ops if op.target.name.endswith("copy_of")]
        (kept,) = copy.outs
        return renamed(after, {kept: copy.ins[0]}, lambda op: op.phase is Phase.BW)

    plant(monkeypatch, "recompute", careless)
    verified_nothing(monkeypatch)
    error = check_error("thunder", overwritten, leaf(4), leaf(4))
    assert error.stage == "recompute"
    assert "mul" in error.op
    assert f"{__file__}:{line_of('h.mul_(y)')}" in str(error)


@BOTH
def test_two_cotangents_swapped_by_group_get_grad_are_found(frontend, monkeypatch):
    def swapped(before, after):
        first, second = names_of(after, lambda op: Tag.GET_GRAD in op.tags)
        names = {first: second, second: first}
        return after.rebuild([op.rename_outputs(names) if Tag.GET_GRAD in op.tags else op for op in after.ops],
                             by="group_get_grad")

    plant(monkeypatch, "group_get_grad", swapped)
    error = check_error(frontend, Block(), leaf(5, 6))
    assert error.stage == "group_get_grad"
    assert "get_grad" in error.op


def verified_nothing(monkeypatch):
    """Let through what is wrong with memory, as if no tag had told of the write."""
    monkeypatch.setattr(pipeline._Recorder.record, "__defaults__", (lambda trace, name: None,))


def reordered(trace):
    """Move each write of a trace to its start, as far as what it reads allows."""
    writes = [op for op in trace.ops if op.writes]
    first = [op for op in trace.ops if set(op.outs) & {name for w in writes for name in w.ins}]
    others = [op for op in trace.ops if op not in first and op not in writes]
    return trace.rebuild([*first, *writes, *others], by="fuse")


def test_a_write_that_fuse_moves_before_a_read_is_found(monkeypatch):
    def counted(x, state):
        out = x * state
        state.add_(1.0)
        return out.sin()

    plant(monkeypatch, "fuse", lambda before, after: reordered(after))
    verified_nothing(monkeypatch)
    error = check_error("thunder", counted, leaf(4), torch.ones(4))
    assert error.stage == "fuse"
    assert "mul" in error.op


@BOTH
def test_an_output_that_fuse_takes_for_another_is_found(frontend, monkeypatch):
    def confused(trace):
        return trace.rebuild([_two_outputs_swapped(op) if op.body is not None else op for op in trace.ops], by="fuse")

    plant(monkeypatch, "fuse", lambda before, after: confused(after))
    fuse = aot.fuse
    monkeypatch.setattr(aot, "fuse", lambda trace, executors: confused(fuse(trace, executors)))
    error = check_error(frontend, Block(), leaf(5, 6), executor="torch_compile")
    assert error.stage == "fuse"


def _two_outputs_swapped(region):
    body = region.body
    same = [(a, b) for a in region.outs for b in region.outs
            if a < b and body.types[a] == body.types[b] and len(body.types[a].shape) == 2]
    if not same:
        return region
    first, second = same[0]
    names = {first: second, second: first}
    outputs = tuple(Var(names.get(leaf.name, leaf.name)) for leaf in body.outputs)
    return region.replace(body=replace(body, outputs=outputs))


def test_two_saved_tensors_swapped_by_split_are_found(monkeypatch):
    split = pipeline.split

    def swapped(trace):
        halves = split(trace)
        count = len(trace.outputs)
        types = halves.forward.types
        outputs = list(halves.forward.outputs)
        saved = range(count, len(outputs))
        first, second = next((i, j) for i in saved for j in saved
                             if i < j and types[outputs[i].name] == types[outputs[j].name])
        outputs[first], outputs[second] = outputs[second], outputs[first]
        return replace(halves, forward=replace(halves.forward, outputs=tuple(outputs)))

    monkeypatch.setattr(pipeline, "split", swapped)
    error = check_error("thunder", Block(), leaf(5, 6))
    assert error.stage == "split"
    assert "is handed" in str(error) or "%" in error.op


def test_a_gradient_that_generated_code_returns_for_another_input_is_found(monkeypatch):
    compile_trace = aot.compile_trace

    def miswired(trace, name, **options):
        if name == "backward":
            first, second, *others = trace.outputs
            trace = replace(trace, outputs=(second, first, *others))
        return compile_trace(trace, name, **options)

    monkeypatch.setattr(aot, "compile_trace", miswired)
    error = check_error("dynamo", lambda x, y: x.sin() * y, leaf(4), leaf(4))
    assert error.stage == "generated code"
    assert "gradient of input" in str(error)
    assert "mul" in error.op


def test_a_wrong_gradient_rule_is_found(monkeypatch):
    from jointtrace.joint import rules

    silu_backward = rules.silu_backward
    monkeypatch.setattr(rules, "silu_backward", lambda g, a: silu_backward(g, a) * 2)
    error = check_error("thunder", Block(), leaf(5, 6))
    assert error.stage == "build_joint"
    assert "mul" in error.op or "silu_backward" in error.op
    assert f"{__file__}:{line_of('F.silu(self')}" in str(error)
