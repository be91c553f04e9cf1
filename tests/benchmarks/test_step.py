import json

import models
import pytest
import step
import torch
import typer
from typer.testing import CliRunner

from jointtrace.errors import OptionError

app = typer.Typer()
app.command()(step.main)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_returns_a_loss_that_reaches_every_parameter(name):
    model, inputs = models.build(name, 1, torch.float32)
    model(*inputs).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bfloat16_means_weights_and_inputs_but_not_tokens():
    model, (images, labels) = models.build("vit", 1, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (images.dtype, labels.dtype) == (torch.bfloat16, torch.int64)
    assert model(images, labels).dtype == torch.bfloat16


def test_variants_keep_the_order_of_the_table():
    assert step.select("floor,eager", None, None) == ["eager", "floor"]
    assert step.select("all", None, None) == [*step.COMPILERS, "floor"]


def test_without_a_compiler_what_needs_one_is_left_out():
    assert step.select("all", None, "no C++ compiler") == [
        "eager", "thunder", "jointtrace-eager", "jointtrace-dynamo-eager", "floor"]


def test_an_executor_leaves_out_the_other_one():
    assert not {"jointtrace-eager", "jointtrace-dynamo-eager"} & set(step.select("all", "torch_compile", None))
    assert not {"jointtrace", "jointtrace-dynamo"} & set(step.select("all", "eager", None))


def test_an_unknown_variant_is_refused_by_name():
    with pytest.raises(OptionError, match=r"'inductor'; accepted: all, eager, torch\.compile"):
        step.select("eager,inductor", None, None)


def test_an_unknown_variant_on_the_command_line_is_a_usage_error(tmp_path):
    result = invoke("--variants", "inductor", "--json", tmp_path / "step.jsonl")
    assert result.exit_code == 2
    assert not (tmp_path / "step.jsonl").exists()


def result(variant, seconds, kept_bytes):
    return step.Result(variant, seconds, step.Memory(kept_bytes, kept_bytes), 0.1)


def test_figures_are_medians_of_paired_ratios_and_a_quotient_of_kept_bytes():
    results = [
        result("eager", [4.0, 8.0, 4.0], 100),
        result("torch.compile", [2.0, 4.0, 2.0], 100),
        result("jointtrace", [2.2, 4.0, 2.0], 90),
        result("jointtrace-eager", [4.4, 8.8, 4.0], 95),
        result("jointtrace-dynamo", [2.2, 4.1, 2.0], 70),
        result("jointtrace-dynamo-eager", [4.4, 8.8, 4.0], 95),
    ]
    over = {reference: step.ratios(results, reference) for reference in ("torch.compile", "eager", "floor")}
    figures = step.figures_of([step.record_of(one, over) for one in results])
    assert [figure.measured for figure in figures] == pytest.approx([1.0, 1.1, 1.025, 1.1, 0.9, 0.7])
    assert [figure.passed for figure in figures] == [True, True, False, False, False, True]


def test_a_run_writes_one_line_per_variant_and_the_floor_has_no_memory(tmp_path):
    path = tmp_path / "step.jsonl"
    ran = invoke("--model", "mlp", "--layers", 1, "--variants", "eager,floor", "--rounds", 2, "--json", path)
    assert ran.exit_code == 0, ran.output
    eager, floor = (json.loads(line) for line in path.read_text().splitlines())
    assert (eager["variant"], floor["variant"]) == ("eager", "floor")
    assert eager["peak_bytes"] >= eager["kept_bytes"] > 0
    assert floor["kept_bytes"] is None
    assert set(eager["ratio"]) == {"eager", "floor"}
