"""The plugin switches the option on, the runner goes on behind a test that dies, the comparison sees what is lost."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conformance.thunder_suite.compare import compare, read_lines
from conformance.thunder_suite.expected import EXPECTED

HERE = Path(__file__).parent

PLANTED = '''
import os
import thunder
import torch

def test_that_killed_its_process_before():
    os._exit(8)

def test_switched():
    compiled = thunder.jit(torch.sin)
    compiled(torch.ones(2))
    assert any("jointtrace" in str(trace.get_provenance()) for trace in thunder.last_traces(compiled))

def test_set_by_the_test_itself():
    compiled = thunder.jit(torch.sin, delay_trace_split=False)
    assert thunder.compile_data(compiled).compile_options["delay_trace_split"] is False

def test_lost():
    assert "delay_trace_split" not in thunder.compile_data(thunder.jit(torch.sin)).compile_options

def test_kills_the_process():
    os._exit(9)
'''


def test_the_plugin_switches_the_option_on_and_goes_on_behind_a_test_that_died(tmp_path):
    (tmp_path / "test_planted.py").write_text(PLANTED)
    outcomes = tmp_path / "outcomes.jsonl"
    outcomes.write_text('{"test": "test_planted.py::test_that_killed_its_process_before", "outcome": "crashed"}\n')
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "suite.ini"), f"--rootdir={tmp_path}",
               "--outcomes", str(outcomes), "--delay-trace-split", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stdout + done.stderr
    found = {line["test"].partition("::")[2]: line for line in read_lines(outcomes)}
    assert {test: line["outcome"] for test, line in found.items()} == {
        "test_that_killed_its_process_before": "crashed", "test_switched": "passed",
        "test_set_by_the_test_itself": "passed", "test_lost": "failed", "test_kills_the_process": "crashed"}
    assert found["test_switched"]["compiled"] == 1
    assert found["test_set_by_the_test_itself"]["compiled"] == 0


def test_the_comparison_sees_what_is_lost_and_what_is_expected_to_be():
    def run(*failing: str) -> dict[str, dict[str, str]]:
        tests = ("test_a.py::one", "test_a.py::two", "test_b.py::three")
        return {test: {"outcome": "failed" if test in failing else "passed"} for test in tests}

    lost = "test_a.py::two"
    assert compare(run(), run(), {}).good
    assert compare(run(lost), run(lost), {}).good
    found = compare(run(), run(lost), {})
    assert not found.good
    assert list(found.regressions) == [lost]
    assert [(row.file, row.passed_without, row.passed_with, row.regressions) for row in found.rows] == [
        ("test_a.py", 2, 1, 1), ("test_b.py", 1, 1, 0), ("all", 3, 2, 1)]
    assert compare(run(), run(lost), {lost: "a reason"}).good


def test_an_expected_difference_that_is_none_is_an_error():
    outcomes = {"test_a.py::one": {"outcome": "passed"}}
    found = compare(outcomes, outcomes, {"test_a.py::one": "a reason"})
    assert not found.good
    assert found.stale == ("test_a.py::one",)


@pytest.mark.parametrize("became", [None, {"outcome": "crashed"}, {"outcome": "skipped"}],
                         ids=["not run", "crashed", "skipped"])
def test_a_test_that_is_not_run_or_kills_its_process_or_is_skipped_is_lost(became):
    with_ = {} if became is None else {"test_a.py::one": became}
    assert not compare({"test_a.py::one": {"outcome": "passed"}}, with_, {}).good


def test_every_expected_difference_has_a_reason():
    assert all(len(reason.split()) > 5 and "::" in test for test, reason in EXPECTED.items())
