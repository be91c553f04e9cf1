import json
from contextlib import nullcontext

import budgets
import dropped
import hf_models
import memory
import models
import nanogpt
import pytest
import side_by_side
import torch
import typer
from harness import console_of
from side_by_side import Setting, Side, by_thunder, by_torch_compile
from typer.testing import CliRunner

from jointtrace.demo.measure import Memory

app = typer.Typer()
app.command()(memory.main)
UNTIMED = Setting(0, console_of())
EAGER = {"eager": lambda model: model}


def tiny(name):
    return models.build(name, 2, torch.float32, sizes=models.TINY)


def side(name, kept, peak=0, error=0.0, seconds=(1.0,)):
    return Side(name, Memory(kept, peak), error, list(seconds))


def test_rows_run_in_the_tables_order_and_an_unknown_one_is_a_usage_error():
    assert memory.chosen("dropout,llama") == ["llama", "dropout"]
    assert memory.chosen(None) == list(memory.ROWS)
    refused = CliRunner().invoke(app, ["--only", "lama"])
    assert (refused.exit_code, "accepted: llama, autocast" in refused.output) == (2, True)


def test_a_figure_is_missed_where_more_is_kept_or_a_step_takes_longer():
    ours, theirs = side("ours", 70, seconds=[1.0, 3.0, 1.0]), side("theirs", 100, seconds=[1.0, 1.0, 1.0])
    assert [figure.passed for figure in memory.compared("", ours, theirs, 0.70, 1.0)] == [True, True]
    assert [figure.passed for figure in memory.compared("", ours, theirs, 0.69, 0.99)] == [False, False]


def test_the_error_of_a_row_is_the_largest_of_ours():
    sides = {name: side(name, 1, error=error) for name, error in
             {"torch.compile": 1e-6, "jointtrace": 1e-6, "jointtrace-dynamo": 3e-5}.items()}
    (figure,) = memory.errors("", sides)
    assert not figure.passed
    assert figure.measured == pytest.approx(30)


def test_errors_are_differences_over_the_tensors_largest_value():
    loss, weight, key_bias = torch.tensor(2.0), torch.tensor([4.0, 0.0]), torch.tensor([1e-9])
    wrong = [loss, weight + torch.tensor([0.0, 0.4]), key_bias]
    assert side_by_side.error_of(wrong, [loss, weight, key_bias]) == pytest.approx(0.1)
    noisy = [loss, weight, -key_bias]
    assert side_by_side.error_of(noisy, [loss, weight, key_bias]) < 1e-6
    assert side_by_side.error_of([loss, weight], [loss, weight, key_bias]) == float("inf")


def test_a_variant_that_cannot_be_compiled_is_left_out_only_where_it_may_fail():
    def refuse(model):
        raise RuntimeError("no rule for it\nand more")

    compilers = {**EAGER, "refusing": lambda model: lambda *inputs: refuse(model)}
    assert list(side_by_side.side_by_side(tiny("mlp"), compilers, UNTIMED, may_fail={"refusing"})) == ["eager"]
    with pytest.raises(RuntimeError, match="no rule"):
        side_by_side.side_by_side(tiny("mlp"), compilers, UNTIMED)


def test_a_checkpoint_around_every_block_keeps_less_and_changes_no_gradient():
    compilers = {**EAGER, "by hand": side_by_side.checkpointed}
    sides = side_by_side.side_by_side(tiny("llama"), compilers, UNTIMED)
    assert sides["by hand"].kept_over(sides["eager"]) < 0.5
    assert sides["by hand"].error == 0.0


def test_the_forward_runs_in_the_context_of_the_setting():
    seen = []

    def around():
        seen.append("entered")
        return nullcontext()

    side_by_side.side_by_side(tiny("mlp"), EAGER, Setting(1, console_of(), around))
    assert len(seen) == 5  # first call, memory, results, warm-up, one round


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_every_model_of_transformers_returns_a_loss_that_reaches_its_parameters(name):
    model, inputs = hf_models.build(name, 1, sizes=models.TINY)
    loss = model(*inputs)
    loss.backward()
    reached = [parameter.grad is not None for parameter in model.parameters()]
    assert loss.ndim == 0
    assert sum(reached) >= len(reached) - 2  # Bert's and ViT's classifiers leave a pooler or mask token out


@pytest.mark.parametrize("executor", ["eager", "torch_compile"])
def test_a_smaller_budget_never_plans_a_higher_peak(executor):
    joint = budgets.joint_of(tiny("mlp"), executor)
    plans = budgets.plans(joint, executor, (1, 0.5, 0))
    assert list(plans.peak_bytes) == sorted(plans.peak_bytes, reverse=True)


def test_a_model_that_cannot_be_traced_is_an_error_not_an_empty_plan():
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise ValueError("broken")

    with pytest.raises(Exception, match="broken"):
        budgets.joint_of((Broken(), (torch.ones(2),)), "eager")


@pytest.mark.parametrize("compile_", [by_thunder, by_torch_compile], ids=["thunder", "dynamo"])
@pytest.mark.parametrize("budget", [0, 0.25, 0.5, 0.75, 1])
def test_gradients_are_exact_for_the_dropout_masks_that_the_forward_drew(compile_, budget):
    assert dropped.error_of(compile_(memory_budget=budget, executors=("eager",))) < dropped.TOLERANCE


def test_masks_drawn_anew_in_the_backward_would_be_found():
    class Redrawn(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(
                self.module, x, use_reentrant=False, preserve_rng_state=False)

    assert dropped.error_of(Redrawn) > 1e-2


def test_thunders_estimator_gives_our_backward_less_where_attention_is_one_kernel(monkeypatch):
    monkeypatch.setattr(nanogpt, "CONTEXT", 256)
    decomposed, fused = (nanogpt.planned_by_ours("eager", fused_attention=fused) for fused in (False, True))
    assert fused.unclaimed < decomposed.unclaimed < nanogpt.planned_by_thunder()
    assert fused.claimed == fused.unclaimed  # no region hides anything


def test_a_row_writes_its_plans_and_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "PLANNED", ("mlp",))
    monkeypatch.setattr(memory, "STEPS", 3)
    path = tmp_path / "memory.jsonl"
    ran = CliRunner().invoke(app, ["--only", "budgets", "--json", str(path)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert ran.exit_code == 0, ran.output
    assert [line["budgets"] for line in lines if line.get("executor") == "eager"] == [[1.0, 0.5, 0.0]]
    assert {line["verdict"] for line in lines if "figure" in line} == {"pass"}
