"""cli: options reach the functions behind them; our errors are one line."""
from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import jointtrace
import jointtrace.demo
from jointtrace.cli import app


@pytest.fixture
def demo(monkeypatch):
    """Catch what the demo is asked to do."""
    calls = []

    def run(out, steps, executor, layers):
        calls.append((out, steps, executor, layers))
        if executor == "nope":
            raise jointtrace.OptionError("unknown executor 'nope'")
        return 1 if executor == "wrong" else 0

    monkeypatch.setattr(jointtrace.demo, "run", run)
    return calls


def test_demo_options_reach_the_demo(demo, tmp_path):
    done = CliRunner().invoke(
        app, ["demo", "--out", str(tmp_path), "--steps", "3", "--executor", "eager", "--layers", "2"]
    )
    assert done.exit_code == 0, done.output
    assert demo == [(tmp_path, 3, "eager", 2)]


def test_demo_runs_without_options(demo):
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0
    ((out, _, executor, _),) = demo
    assert (out, executor) == (Path("jointtrace-demo"), None)


def test_the_exit_code_of_the_demo_is_kept(demo):
    assert CliRunner().invoke(app, ["demo", "--executor", "wrong"]).exit_code == 1


def test_a_bad_option_is_one_line_and_exit_code_2(demo):
    done = CliRunner().invoke(app, ["demo", "--executor", "nope"])
    assert done.exit_code == 2
    assert done.stderr == "error: unknown executor 'nope'\n"


def test_a_number_below_one_is_refused(demo):
    assert CliRunner().invoke(app, ["demo", "--steps", "0"]).exit_code == 2
    assert not demo


def test_version_is_printed():
    assert CliRunner().invoke(app, ["--version"]).stdout == jointtrace.__version__ + "\n"


def test_doctor_runs_as_a_command():
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "jointtrace can be used here." in done.stdout


def test_the_command_line_is_read_without_torch(python):
    python("import sys, jointtrace.cli; assert not {'torch', 'thunder'} & set(sys.modules)")
