"""Reports and dumps of torch.compile: parts, reasons, provenance, artifacts in torch's structured trace."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from numerics.oracle import jit, leaf
from torch import nn

import jointtrace
from jointtrace.ir.op import Phase, Tag
from jointtrace.ir.text import constants, parse
from jointtrace.reporting.registry import find

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo, at graph breaks


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn, executor="eager", **options):
    return torch.compile(fn, backend="jointtrace", options={"executors": (executor,)}, **options)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        return torch.nn.functional.gelu(y) + x.sin()


class Broken(nn.Module):
    def forward(self, x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos().exp()


def backward_ops(trace):
    return [op for op in trace.ops if op.phase is Phase.BW and Tag.GET_GRAD not in op.tags]


@pytest.mark.parametrize("compile_fn", [compiled, jit], ids=["torch.compile", "thunder"])
def test_each_backward_op_names_its_forward_op_and_line(compile_fn):
    step = compile_fn(Residual())
    step(leaf(2, 4)).sum().backward()
    ops = backward_ops(jointtrace.report(step).passes[0].trace)
    assert ops
    assert [op for op in ops if op.source is None or not op.source.op] == []
    # thunder says where in torch.nn a functional call stands
    assert {op.source.file for op in ops} <= {"test_dynamo.py", "linear.py", "activation.py"}


def test_a_backward_op_has_the_module_path_of_its_forward_op():
    step = compiled(Residual())
    step(leaf(2, 4)).sum().backward()
    ops = backward_ops(jointtrace.report(step).passes[0].trace)
    products = [op for op in ops if op.target.name == "aten.mm.default"]
    assert {(op.source.module, op.source.op) for op in products} == {("inner", "aten.addmm.default")}


def test_a_sum_of_gradients_goes_with_the_gradient_it_adds():
    def function(x):
        y = x.exp()
        return y.sin() + y.cos()

    step = compiled(function)
    step(leaf(3)).sum().backward()
    (add,) = (op for op in backward_ops(jointtrace.report(step).passes[0].trace) if op.target.name == "aten.add.Tensor")
    assert add.source.op == "aten.sin.default"


def test_decomposed_ops_name_the_operator_that_was_called():
    step = compiled(Residual(), "torch_compile")
    step(leaf(2, 4)).sum().backward()
    ops = backward_ops(jointtrace.report(step).passes[0].trace)
    assert "aten.gelu.default" in {op.source.op for op in ops if op.target.name == "aten.mul.Tensor"}


def test_the_forward_op_stays_known_in_the_backward_as_it_runs():
    step = compiled(Residual())
    step(leaf(2, 4)).sum().backward()
    assert " of aten.gelu.default" in jointtrace.dump(step, "backward")
    trace = jointtrace.report(step).passes[0].trace
    assert parse(str(trace), constants(trace)) == trace


def test_kept_values_name_the_forward_op_and_line():
    step = compiled(Residual(), "torch_compile")
    step(leaf(2, 4)).sum().backward()
    (kept,) = (value for value in jointtrace.report(step).saved if not value.is_input)
    assert (kept.made_by, kept.source.file, kept.source.module) == ("aten.addmm.default", "test_dynamo.py", "inner")
    assert f"aten.addmm.default  test_dynamo.py:{kept.source.line} (inner)" in str(jointtrace.report(step))


def test_parts_between_graph_breaks_are_numbered_sections():
    step = compiled(Broken())
    step(leaf(3)).sum().backward()
    text = str(jointtrace.report(step))
    headings = [line for line in text.splitlines() if line.startswith("compilation ")]
    assert len(headings) == 2
    assert headings[0].startswith("compilation 1: [0/0] forward (test_dynamo.py:")
    assert "up to the graph break at test_dynamo.py:" in headings[0]
    assert "graph_break" in headings[0]
    assert "forward from test_dynamo.py:" in headings[1]


def test_a_compilation_for_another_shape_is_a_section_with_its_reason():
    step = compiled(lambda x: x.sin(), dynamic=False)
    for size in (3, 4):
        step(leaf(size))
    first, second = jointtrace.report(step).compilations
    assert first.origin.again == ""
    assert "size mismatch" in second.origin.again
    assert "compilation 2: [0/1]" in str(jointtrace.report(step))
    assert "compiled again: " in str(jointtrace.report(step))


def test_all_parts_can_be_dumped_at_once():
    step = compiled(Broken())
    step(leaf(3)).sum().backward()
    text = jointtrace.dump(step, compilation=None)
    assert [line[:15] for line in text.splitlines() if line.startswith("# ")] == ["# compilation 0", "# compilation 1"]
    assert "aten.sin.default" in text
    assert "aten.exp.default" in text


def test_calls_of_the_regions_of_both_halves_are_counted_apart():
    step = compiled(Residual(), "torch_compile")
    for _ in range(2):
        out = step(leaf(2, 4))
    out.sum().backward()
    assert [(region.phase, region.calls) for region in jointtrace.report(step).regions] == [("fw", 2), ("bw", 1)]


def test_a_compilation_none_of_whose_regions_was_called_says_so():
    step = compiled(Residual(), "torch_compile")
    step(leaf(2, 4))
    find(step)[0].counters.reset()
    assert not jointtrace.report(step).last.ran
    assert "NEVER RAN: none of its regions was called" in str(jointtrace.report(step))


def test_inference_is_reported_without_a_backward():
    step = compiled(Residual())
    with torch.no_grad():
        step(torch.randn(2, 4))
    report = jointtrace.report(step)
    assert report.last.finished
    assert report.saved == ()
    assert jointtrace.dump(step, "backward") == ""


def test_stages_are_written_to_numbered_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("JOINTTRACE_DUMP", str(tmp_path))
    step = compiled(Broken())
    step(leaf(3)).sum().backward()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000_dynamo", "001_dynamo"]
    for folder, part in (("000_dynamo", 0), ("001_dynamo", 1)):
        for half in ("forward", "backward"):
            written = (tmp_path / folder / f"{half}.txt").read_text()
            assert written == jointtrace.dump(step, half, compilation=part) + "\n"
        assert (tmp_path / folder / "00_joint.txt").exists()
        assert "def forward(self" in (tmp_path / folder / "program.txt").read_text()


SCRIPT = """
import torch
import jointtrace

def function(x):
    return x.sin().exp()

step = torch.compile(function, backend="jointtrace", options={"executors": ("eager",)})
step(torch.ones(3, requires_grad=True)).sum().backward()
"""


def test_stages_are_artifacts_of_torchs_structured_trace(tmp_path):
    (tmp_path / "program.py").write_text(SCRIPT)
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path / "log")}
    subprocess.run([sys.executable, tmp_path / "program.py"], check=True, env=environment, timeout=120)
    (log,) = (tmp_path / "log").iterdir()
    artifacts = dict(artifacts_in(log.read_text()))
    assert {"jointtrace_00_joint", "jointtrace_forward", "jointtrace_backward"} <= set(artifacts)
    assert any(name.endswith("_recompute") for name in artifacts)
    assert "aten.sin.default" in artifacts["jointtrace_forward"]
    assert "of aten.sin.default" in artifacts["jointtrace_backward"]


def artifacts_in(log):
    """Yield the name and the text of each of our artifacts in a structured trace: a line of JSON, then text."""
    for entry in re.split(r"^(?=V)", log, flags=re.MULTILINE):
        head, _, text = entry.partition("\n")
        name = json.loads(head[head.index("{") :]).get("artifact", {}).get("name", "") if head else ""
        if name.startswith("jointtrace_"):
            assert '"frame_id": 0, "frame_compile_id": 0' in head, "tlparse files it under the frame it belongs to"
            yield name, text
