"""doctor: says what is there, what is missing, and whether that is enough."""
from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from jointtrace import doctor
from jointtrace.compat import versions
from jointtrace.executors import registry
from jointtrace.executors.eager import EagerExecutor


def _printed(**console):
    out = io.StringIO()
    code = doctor.doctor(Console(file=out, width=300, **console))
    return code, out.getvalue()


def _lines(text):
    return {line.split("  ")[1]: line for line in text.splitlines() if line.startswith("  ")}


def test_it_is_content_where_thunder_runs():
    code, text = _printed()
    assert code == 0
    assert text.endswith("jointtrace can be used here.\n")
    lines = _lines(text)
    assert torch.__version__.partition("+")[0] in lines["torch"]
    assert "0.2.6" in lines["lightning-thunder"]
    assert "repaired" in lines["autograd.Function.apply(x, x) fails"]
    assert "not repaired" not in text
    assert "available" in lines["eager"]


@pytest.mark.parametrize(
    ("version", "said"),
    [("2.13.0+cpu", "tested"), ("2.14.1", "tested"), ("2.12.0", "untested; tested are 2.13.0, 2.14.1")],
)
def test_it_tells_tested_from_untested_torch(monkeypatch, version, said):
    monkeypatch.setattr(versions, "installed", lambda package: version if package == "torch" else "0.2.6")
    assert _lines(_printed()[1])["torch"].split("  ")[-1] == said


def test_a_break_of_another_torch_is_called_not_needed(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda package: "2.10.0" if package == "torch" else "0.2.6")
    lines = _lines(_printed()[1])
    assert "not needed" in lines["import: named-tensor methods are gone"]
    assert "torch>=2.13" in lines["import: named-tensor methods are gone"]


def test_an_unavailable_executor_gives_its_reason(monkeypatch):
    class Absent(EagerExecutor):
        name = "absent"

        def unavailable(self):
            return "the part [x] is missing"

    executors = {"absent": Absent(), "eager": EagerExecutor()}
    monkeypatch.setattr(registry, "all_executors", lambda: executors)
    code, text = _printed()
    assert code == 0
    assert "unavailable  the part [x] is missing" in _lines(text)["absent"]


def test_no_compiler_is_said_and_is_not_fatal(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    code, text = _printed()
    assert code == 0
    assert "not found  looked for g++, clang++, c++" in _lines(text)["C++ compiler"]


def test_the_compiler_named_by_the_user_is_the_one_looked_for(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "looked for no-such-compiler;" in _printed()[1]


def test_it_fails_where_thunder_cannot_be_imported(monkeypatch):
    def broken(name):
        raise ImportError("no attribute [sic]")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    code, text = _printed()
    assert code == 1
    assert _lines(text)["import thunder"].split("failed")[1].strip() == "ImportError: no attribute [sic]"
    assert text.endswith("jointtrace cannot be used here: import thunder.\n")
    assert "not repaired" in text


def test_a_terminal_gets_tables():
    assert "│ torch" in _printed(force_terminal=True)[1]
    assert "│" not in _printed()[1]
