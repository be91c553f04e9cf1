"""jointtrace report: one row a budget, the figures of the report beside what is measured, and errors that help."""
from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from jointtrace.cli import app

USER = """
import torch

def small():
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)), torch.randn(64, 32)

def wrong():
    return 3

def without_gradient():
    class Constant(torch.nn.Module):
        def forward(self, x):
            return x.sin()
    return Constant(), (torch.randn(3),)
"""


@pytest.fixture
def report(tmp_path, monkeypatch):
    (tmp_path / "users_model.py").write_text(USER)
    monkeypatch.chdir(tmp_path)

    def run(*args):
        return CliRunner().invoke(app, ["report", *args, "--executor", "eager", "--output", "out"])

    return run


@pytest.mark.parametrize("front_end", ["torch.compile", "thunder"])
def test_a_row_for_each_budget_and_a_page_and_a_plot(report, tmp_path, front_end):
    done = report("users_model:small", "--memory-budget", "0, 0.5", "--frontend", front_end)
    assert done.exit_code == 0, done.output
    table = (tmp_path / "out/table.txt").read_text()
    rows = re.findall(r"^│ (\S+) +│ +([\d.]+) KiB │ +([\d.]+) KiB │ +([\d.]+) KiB │ +[\d.]+ │ +([\d.]+) │", table, re.M)
    assert [row[0] for row in rows] == ["0", "0.5", "1"]
    for _, planned, measured, _, _ in rows:
        assert float(planned) == pytest.approx(float(measured), rel=0.1)
    assert float(rows[0][3]) <= float(rows[2][3])
    assert rows[2][4] == "1.000"
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {"table.txt", "tradeoff.png", "budget-0.html", "budget-0.5.html", "budget-1.html"}


def test_without_a_budget_one_compilation_is_shown(report, tmp_path):
    done = report("mlp", "--layers", "1")
    assert done.exit_code == 0, done.output
    assert "kept for the backward" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"memory.html", "memory.png"}


@pytest.mark.parametrize(("args", "message"), [
    (["lama"], r"model 'lama'; accepted: llama, gpt2, vit, mlp, or module.path:function of your own"),
    (["no_such_module:f"], r"No module named 'no_such_module'; it is looked for"),
    (["users_model:f"], r"has no attribute 'f'"),
    (["users_model:wrong"], r"returned int; it must return \(module, inputs\)"),
    (["users_model:without_gradient"], r"nothing that the model returns has a gradient"),
    (["mlp", "--memory-budget", "0,2.5"], r"option memory_budget=2.5; accepted:"),
    (["mlp", "--memory-budget", "0,much"], r"option memory_budget='much'; accepted:"),
    (["mlp", "--frontend", "jax"], r"option frontend='jax'; accepted: torch.compile, thunder"),
])
def test_what_is_wrong_is_said_in_one_line(report, args, message):
    done = report(*args)
    assert done.exit_code == 2, done.output
    assert re.fullmatch(rf"error: .*{message}.*\n", done.stderr), done.stderr
