"""Dumps: every stage as text, on demand and in folders, also of a compilation that failed."""
from __future__ import annotations

import pytest
import torch
from numerics.oracle import jit, leaf

import jointtrace
from jointtrace import pipeline
from jointtrace.errors import OptionError, UnsupportedError, VerifyError
from jointtrace.ir.text import parse


def sine(x):
    return torch.sin(x) * 2


@pytest.fixture
def compiled():
    fn = jit(sine)
    fn(leaf(3)).sum().backward()
    return fn


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that dumps go to; it does not exist yet."""
    monkeypatch.setenv("JOINTTRACE_DUMP", str(tmp_path / "made" / "on demand"))
    return tmp_path / "made" / "on demand"


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_stage_is_text_that_parses_back(compiled):
    stages = jointtrace.report(compiled).passes
    assert parse(jointtrace.dump(compiled)) == stages[0].trace
    assert parse(jointtrace.dump(compiled, "recompute")) == next(s.trace for s in stages if s.name == "recompute")


def test_both_halves_are_stages(compiled):
    assert "fw:" in jointtrace.dump(compiled, "forward")
    assert "bw:" in jointtrace.dump(compiled, "backward")
    assert "get_grad" in jointtrace.dump(compiled, "joint")
    assert "get_grad" not in jointtrace.dump(compiled, "backward")


def test_all_stages_are_dumped_each_as_often_as_it_ran(compiled):
    text = jointtrace.dump(compiled, "all")
    names = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    assert names.count("dce") == 2
    assert names[0] == "joint"
    assert names[-2:] == ["forward", "backward"]


def test_an_unknown_stage_is_answered_with_those_there_are(compiled):
    with pytest.raises(OptionError, match=r"no stage 'fused'; there are: joint, build_joint, .*recompute.*, all"):
        jointtrace.dump(compiled, "fused")


def test_any_compilation_can_be_dumped(compiled):
    compiled(leaf(4, 5))
    assert "f32[4, 5]" in jointtrace.dump(compiled)
    assert "f32[3]" in jointtrace.dump(compiled, compilation=0)
    with pytest.raises(OptionError, match="no compilation 2; there are 2"):
        jointtrace.dump(compiled, compilation=2)


def test_without_a_backward_its_dump_is_empty():
    compiled = jit(sine)
    compiled(torch.randn(3))
    assert jointtrace.dump(compiled, "backward") == ""


def test_every_compilation_gets_a_numbered_folder(folder):
    compiled = jit(sine)
    compiled(leaf(3))
    compiled(leaf(4))
    assert files(folder) == ["000_thunder", "001_thunder"]
    names = files(folder / "000_thunder")
    assert names[:2] == ["00_build_joint.txt", f"01_{pipeline.PASSES[0][0]}.txt"]
    assert names[-3:] == ["backward.txt", "forward.txt", "program.txt"]
    assert (folder / "001_thunder" / "00_build_joint.txt").read_text() == jointtrace.dump(compiled) + "\n"


def test_a_program_that_is_refused_leaves_itself_and_the_error(folder):
    with pytest.raises(UnsupportedError):
        jit(lambda x: torch.exp(x))(leaf(3, dtype=torch.complex64))
    assert files(folder / "000_thunder") == ["error.txt", "program.txt"]
    assert "complex numbers" in (folder / "000_thunder" / "error.txt").read_text()
    assert "ltorch.exp" in (folder / "000_thunder" / "program.txt").read_text()


def test_a_pass_that_fails_leaves_the_stages_before_it(folder, monkeypatch):
    def broken(trace, *_):
        return trace.rebuild(trace.ops[1:], by="broken")

    passes = tuple((name, broken if name == "cse" else step) for name, step in pipeline.PASSES)
    monkeypatch.setattr("jointtrace.pipeline.PASSES", passes)
    compiled = jit(sine)
    with pytest.raises(VerifyError, match=r"^after cse: "):
        compiled(leaf(3))
    reached = [name for name, _ in passes]
    reached = ["build_joint", *reached[: reached.index("cse") + 1]]
    numbered = [f"{number:02d}_{name}.txt" for number, name in enumerate(reached)]
    assert files(folder / "000_thunder") == [*numbered, "error.txt", "program.txt"]
    assert "VerifyError: after cse" in (folder / "000_thunder" / "error.txt").read_text()
    assert "torch.sin" in jointtrace.dump(compiled)


def test_nothing_is_written_where_no_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("JOINTTRACE_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    jit(sine)(leaf(3))
    assert not list(tmp_path.iterdir())
