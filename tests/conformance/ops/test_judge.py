"""The conformance run itself: what it must see, and what it keeps."""
from __future__ import annotations

import json

import pytest
import torch
from conformance.ops import expected, results, table
from conformance.ops.judge import FRONTS, Front, Verdict, judge_sample, summed_up
from conformance.ops.samples import Sample, differentiable, samples
from torch.testing._internal.opinfo.core import OpInfo

from jointtrace.errors import UnsupportedError


def _judged(name, compile_fn, host=lambda fn: fn, dtype=torch.float64):
    op: OpInfo = differentiable()[name]
    front = Front("planted", compile_fn, host, True)
    return judge_sample(op, samples(op, dtype, 1)[0], dtype, front)[0]


def _raises(error):
    def compile_fn(fn):
        raise error
    return compile_fn


def _without_gradient(fn):
    return lambda *args, **kwargs: fn(*args, **kwargs).detach()


def _scaled_gradient(fn):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.01

    return lambda *args, **kwargs: Scale.apply(fn(*args, **kwargs))


def _writing_to_its_argument(fn):
    def call(x):
        out = fn(x.clone())
        x.data.mul_(1.5)
        return out

    return call


@pytest.mark.parametrize("fault", [
    _scaled_gradient, _without_gradient, lambda fn: lambda *a, **k: fn(*a, **k) * 1.01,
    lambda fn: lambda *a, **k: fn(*a, **k).float(), lambda fn: lambda *a, **k: (fn(*a, **k),),
    _writing_to_its_argument,
], ids=["gradient", "requires_grad", "value", "dtype", "container", "argument"])
def test_a_planted_fault_is_wrong(fault):
    assert _judged("sin", fault) is Verdict.WRONG


def test_a_wrong_gradient_of_a_random_operator_is_seen():
    assert _judged("nn.functional.rrelu", lambda fn: fn) is Verdict.PASS
    assert _judged("nn.functional.rrelu", _scaled_gradient) is Verdict.WRONG


@pytest.mark.parametrize(("error", "host", "verdict"), [
    (UnsupportedError("no"), lambda fn: fn, Verdict.REFUSED),
    (RuntimeError("no"), lambda fn: fn, Verdict.CRASH),
    (RuntimeError("no"), _raises(RuntimeError("no")), Verdict.HOST_REFUSES),
])
def test_an_error_is_a_refusal_where_it_is_ours_and_a_crash_where_it_is_not(error, host, verdict):
    assert _judged("sin", _raises(error), host) is verdict


def test_what_the_host_computes_wrongly_too_has_a_class_of_its_own():
    assert _judged("sin", _scaled_gradient, _scaled_gradient) is Verdict.HOST_WRONG
    assert _judged("sin", _scaled_gradient, lambda fn: fn) is Verdict.WRONG


def test_the_worst_sample_decides():
    found = summed_up("sin", "float32", "thunder", [(Verdict.PASS, ""), (Verdict.WRONG, "why"), (Verdict.REFUSED, "")])
    assert (found.verdict, found.passed, found.samples, found.reason) == (Verdict.WRONG, 1, 3, "why")


def test_samples_are_the_same_at_every_call_and_spread_over_all():
    op = differentiable()["addmm"]
    first, second = (samples(op, torch.float32, 3) for _ in range(2))
    assert [s.args[0].shape for s in first] == [s.args[0].shape for s in second]
    assert all(torch.equal(a.args[0], b.args[0]) for a, b in zip(first, second, strict=True))
    assert isinstance(first[0], Sample)


def test_results_of_another_source_and_a_line_cut_short_are_left_out(tmp_path):
    file = tmp_path / "kept" / "ops.jsonl"
    row = {"op": "sin", "dtype": "float32", "front": "thunder", "verdict": "pass"}
    results.write([row], "old", file)
    results.write([{**row, "op": "cos"}], "new", file)
    with file.open("a") as out:
        out.write(json.dumps(row)[:20])
    assert set(results.read("new", file)) == {("cos", "float32", "thunder")}
    assert len(results.read(None, file)) == 2


def _row(op, verdict, dtype="float32"):
    return {(op, dtype, "thunder"): {"op": op, "dtype": dtype, "front": "thunder", "verdict": verdict, "passed": 1,
                                     "samples": 2, "reason": "why"}}


def test_what_is_expected_to_fail_and_passes_is_a_surprise(monkeypatch):
    monkeypatch.setattr(expected, "_TABLE", {("sin", "thunder"): Verdict.REFUSED})
    assert expected.surprises(_row("sin", "refused")) == []
    assert expected.surprises(_row("sin", "pass")) == ["sin, thunder: pass, expected refused. why"]
    assert expected.surprises(_row("cos", "wrong")) == ["cos, thunder: wrong, expected pass. why"]


def test_everything_that_is_expected_to_fail_is_an_operator_of_the_database():
    assert {op for op, _ in expected._TABLE} <= set(differentiable())
    assert {front for _, front in expected._TABLE} <= set(FRONTS)


def test_the_table_counts_an_operator_by_its_worse_dtype(tmp_path):
    (tmp_path / "README.md").write_text(f"before\n{table.START}\nold\n{table.END}\nafter\n")
    rows = _row("sin", "pass") | _row("sin", "refused", "float64") | _row("cos", "pass")
    rows[("exp", "float32", "thunder, torch_compile")] = {"verdict": "pass"}
    table.write(rows, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| operators | 0 | 2 |" in text
    assert "| refused with a clear error, at least one sample | 0 | 1 (50.0 %) |" in text
    assert "of a few | 0 of 0 | 1 of 1 |" in text
    assert "- `sin` (1 of 2): why" in (tmp_path / "docs" / "coverage.md").read_text()
