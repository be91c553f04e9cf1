"""Memory reports: what is planned is what the allocator sees, and what is kept has its reasons."""
from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import thunder
import torch
from expecttest import assert_expected_inline
from numerics.oracle import compile_below_aot, jit, leaf

import jointtrace
from jointtrace.demo.measure import Step, memory
from jointtrace.demo.models import MODELS, TINY, build
from jointtrace.errors import OptionError
from jointtrace.reporting.memory import KINDS

# a convolution's backward takes scratch as large as its weight, which is not seen: here it is not at the peak
SIZES = {"vit": replace(TINY, image=32, batch=8)}
CLOSE = 0.02  # what the figures of a report may be off; 4 bytes, a scalar cotangent, are what is seen


def by_thunder(model, **options):
    return thunder.jit(model, delay_trace_split=True, jointtrace=options)


FRONT_ENDS = {"thunder": by_thunder, "torch.compile": jointtrace.compile}


def assert_true(step, report):
    """Assert that a report says what the allocator sees of a step."""
    step()  # the gradients of a first step are copies where a layout is not the parameter's
    measured, planned = memory(step), report().memory
    assert planned.notes == ()
    assert planned.peak_bytes == pytest.approx(measured.peak_bytes, rel=CLOSE)
    assert planned.forward_bytes == pytest.approx(measured.kept_bytes, rel=CLOSE)


@pytest.mark.parametrize("executor", ["eager", "torch_compile"])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", MODELS)
def test_planned_memory_is_measured_memory(name, front_end, executor):
    model, inputs = build(name, 2, torch.float32, sizes=SIZES.get(name, TINY))
    compiled = FRONT_ENDS[front_end](model, executors=(executor,))
    step = Step(compiled, tuple(model.parameters()), inputs)
    step()
    assert_true(step, lambda: jointtrace.report(compiled))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_planned_memory_is_measured_memory_within_the_smallest_budget(front_end):
    model, inputs = build("llama", 2, torch.float32, sizes=TINY)
    compiled = FRONT_ENDS[front_end](model, executors=("eager",), memory_budget=0)
    step = Step(compiled, tuple(model.parameters()), inputs)
    step()
    assert_true(step, lambda: jointtrace.report(compiled))


@pytest.mark.filterwarnings("ignore:torch.get_autocast_.pu_dtype:DeprecationWarning")  # thunder, at every call
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_planned_memory_is_measured_memory_under_autocast(front_end):
    model, inputs = build("gpt2", 2, torch.float32, sizes=TINY)
    compiled = FRONT_ENDS[front_end](model, executors=("eager",))

    def loss(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(*args)

    step = Step(loss, tuple(model.parameters()), inputs)
    step()
    assert_true(step, lambda: jointtrace.report(compiled))


def chain(x, w):
    return ((x @ w).sin().exp() @ w).sum()


def test_what_is_kept_has_a_maker_readers_and_a_reason():
    compiled = jit(chain)
    compiled(leaf(8, 8), leaf(8, 8))
    report = jointtrace.report(compiled).memory
    assert {k.why for k in report.kept} == {
        "it cannot be computed again: torch.matmul is compute_bound",
        "it cannot be computed again: torch.exp runs outside a compiled loop",
    }
    (product,) = (k for k in report.kept if k.made_by == "torch.matmul")
    assert (product.shape, product.dtype, product.nbytes, product.source.file) == (
        (8, 8), "float32", 256, "test_memory.py")
    assert any(reader.startswith("torch.cos at test_memory.py:") for reader in product.readers)
    assert set(report.kept_arguments) == set(report.arguments)
    assert report.argument_bytes == 512


def test_the_text_says_what_is_kept_for_whom_and_why():
    compiled = compile_below_aot(chain)
    compiled(leaf(8, 8), leaf(8, 8))
    text = re.sub(r"\.py:\d+", ".py:1", str(jointtrace.report(compiled).memory))
    assert_expected_inline(text, """\
peak 1.3 KiB at aten.mul.Tensor, backward, test_memory.py:1 of aten.exp.default
516 B at the end of the forward, 1.3 KiB at most in the backward, besides 512 B of parameters and other arguments
kept for the backward: 512 B in 2 tensors
     256 B  mm: float32[8, 8], of aten.mm.default at test_memory.py:1
            needed by aten.cos.default at test_memory.py:1 of aten.sin.default; it cannot be computed again: \
aten.mm.default is compute_bound
     256 B  exp: float32[8, 8], of aten.exp.default at test_memory.py:1
            needed by aten.mm.default at test_memory.py:1 of aten.mm.default, aten.mul.Tensor at test_memory.py:1 of \
aten.exp.default; it cannot be computed again: aten.exp.default runs outside a compiled loop
arguments that the backward reads, at no cost: primals_1, primals_2""")


def test_a_value_that_could_be_computed_again_says_what_that_would_cost():
    compiled = compile_below_aot(lambda x: torch.softmax(x.exp(), 0).sin(), "torch_compile")
    compiled(leaf(64, 64))
    kept = jointtrace.report(compiled).memory.kept
    assert {k.why for k in kept} == {"keeping it costs less, by 17.0 KiB of memory traffic"}
    assert all("(computed again)" in reader for k in kept for reader in k.readers)


def test_without_the_pass_all_is_kept():
    compiled = jit_without("recompute")
    compiled(leaf(8, 8), leaf(8, 8))
    assert all("`recompute` is switched off" in k.why for k in jointtrace.report(compiled).memory.kept)


def jit_without(name):
    return thunder.jit(chain, delay_trace_split=True, jointtrace={"executors": ("eager",), "disable": (name,)})


def test_memory_that_several_kept_values_share_counts_once():
    def program(x):
        y = x.exp()
        return y * y.t()

    compiled = jit(program)
    compiled(leaf(16, 16))
    report = jointtrace.report(compiled).memory
    assert report.kept_bytes == 1024
    assert sum(k.nbytes for k in report.kept) == report.kept_bytes


def test_kinds_add_up_and_gradients_live_to_the_end():
    compiled = jit(chain)
    compiled(leaf(8, 8), leaf(8, 8)).backward()
    report = jointtrace.report(compiled).memory
    held = [dict(zip(KINDS, step.nbytes, strict=True)) for step in report.steps]
    assert {h["parameters and other arguments"] for h in held} == {512}
    assert not any(h["gradients"] for h in held[: report.boundary])
    assert held[-1]["gradients"] == 512
    assert held[-1]["kept activations"] == held[0]["gradients"] == 0
    grown = [h["gradients"] for h in held]
    assert grown == sorted(grown)
    assert [step.phase for step in report.steps] == (
        ["fw"] * report.boundary + ["bw"] * (len(report.steps) - report.boundary))
    assert report.peak_bytes == max(report.forward_bytes, report.backward_peak_bytes) == report.peak.total_bytes


def test_cotangents_of_results_are_temporaries_and_results_the_callers():
    compiled = jit(lambda x: x.sin())
    compiled(leaf(16, 16)).sum().backward()
    report = jointtrace.report(compiled).memory
    at_cos = dict(zip(KINDS, next(s for s in report.steps if s.op == "torch.cos").nbytes, strict=True))
    assert (at_cos["results"], at_cos["temporaries"]) == (1024, 2048)


def test_a_region_that_is_not_compiled_yet_is_estimated_and_said_to_be():
    compiled = compile_below_aot(lambda x, w: (x @ w).sin().exp().sum(), "torch_compile")
    out = compiled(leaf(8, 8), leaf(8, 8))
    before = jointtrace.report(compiled).memory
    assert "shows no code" in "".join(before.notes)
    assert "(estimated)" in str(before)
    out.backward()
    after = jointtrace.report(compiled).memory
    assert after.notes == ()
    assert before.peak_bytes == pytest.approx(after.peak_bytes, rel=0.5)


def test_a_peak_inside_a_region_names_the_kernel_and_the_line():
    model, inputs = build("mlp", 2, torch.float32, sizes=TINY)
    compiled = jointtrace.compile(model, executors=("torch_compile",))
    compiled(*inputs).backward()
    report = jointtrace.report(compiled).memory
    inside = [step for step in report.steps if step.region]
    assert any(step.op.startswith("cpp_fused") for step in inside)
    assert any(step.source.file == "models.py" for step in inside)


def test_a_program_that_cannot_run_dry_is_planned_by_ops():
    def program(x):
        return x.exp() * int(x.sum().detach().item() > 1e6)

    compiled = torch.compile(program, backend="jointtrace", options={"executors": ("eager",)})
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled(leaf(8, 8))
    report = jointtrace.report(compiled).memory
    assert report.steps
    assert all("planned op by op" in note for note in report.notes)


def test_the_report_has_a_short_section_on_memory():
    compiled = jit(chain)
    compiled(leaf(8, 8), leaf(8, 8))
    text = str(jointtrace.report(compiled))
    (line,) = (line for line in text.splitlines() if line.startswith("memory"))
    assert re.match(r"memory    peak 1\.\d KiB at torch\.\w+, backward, \S+\.py:\d+", line)


def test_the_page_needs_nothing_else_and_has_every_step(tmp_path):
    compiled = jit(chain)
    compiled(leaf(8, 8), leaf(8, 8))
    report = jointtrace.report(compiled).memory
    report.save(tmp_path / "m.html")
    page = (tmp_path / "m.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert [step[1] for step in data["steps"]] == [step.op for step in report.steps]
    assert data["kinds"] == list(KINDS)
    assert not re.search(r'(src|href)=|url\(|@import|fetch\(', page)
    report.save(tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == page


def test_the_picture_is_a_png_and_the_same_each_time(tmp_path):
    compiled = jit(chain)
    compiled(leaf(8, 8), leaf(8, 8))
    report = jointtrace.report(compiled).memory
    for name in ("a.png", "b.png"):
        report.save(tmp_path / name)
    first = (tmp_path / "a.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert first == (tmp_path / "b.png").read_bytes()


def test_another_ending_is_refused(tmp_path):
    compiled = jit(chain)
    compiled(leaf(8, 8), leaf(8, 8))
    with pytest.raises(OptionError, match=r"m\.pdf: the name of a timeline ends in \.html or \.png"):
        jointtrace.report(compiled).memory.save(tmp_path / "m.pdf")
