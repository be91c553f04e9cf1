import json
import subprocess
import sys
from pathlib import Path

import gpu_check
import pytest
import torch

PLAN = gpu_check.Plan("cpu", "eager", gpu_check.TINY, 1, ("float32",), ("one op", "mlp"), rounds=1)
SCRIPT = Path(gpu_check.__file__)


def cells_of(ways, plan=PLAN):
    return list(gpu_check.cells(plan, ways))


def test_a_small_run_needs_no_package_beyond_torch_thunder_and_igraph(tmp_path):
    unwanted = ("typer", "rich", "matplotlib")
    program = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({unwanted}))  # importing one of them raises
sys.argv = ["gpu_check.py", "--workloads", "one op,mlp", "--rounds", "1", "--json", "lines.jsonl"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n{program}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert len(lines) == len(done.stdout.splitlines()) - 4
    assert {line["variant"] for line in lines} >= {"eager", "jointtrace (thunder)", "jointtrace (torch.compile)"}
    assert all(line["machine"]["device"] for line in lines)
    assert all(line["step_ms"] > 0 and line["failure"] == "" for line in lines)


def test_what_fails_is_a_row_and_the_rest_goes_on(monkeypatch, capsys, tmp_path):
    def broken(model):
        raise RuntimeError("no such thing\nat all")

    monkeypatch.setattr(gpu_check, "compilers", lambda executor: {"broken": broken, "eager": lambda model: model})
    code = gpu_check.main(["--workloads", "one op", "--dtypes", "float32", "--rounds", "1",
                           "--json", str(tmp_path / "lines.jsonl")])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert lines[-3].endswith("FAILED RuntimeError: no such thing")
    assert "FAILED" not in lines[-2]
    assert lines[-1].startswith("1 of 2 cells right")


def test_wrong_gradients_fail_by_how_much_they_are_off():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    wrong = {"wrong": lambda model: lambda *inputs: Doubled.apply(model(*inputs))}
    for cell in cells_of(wrong):
        assert cell.error == pytest.approx(1.0)
        assert cell.failure.startswith("wrong: error 1.0e+00")


def test_a_result_that_is_not_a_number_is_wrong():
    nothing = {"nan": lambda model: lambda *inputs: model(*inputs) * float("nan")}
    assert all("wrong: error nan" in cell.failure for cell in cells_of(nothing))


def test_bfloat16_may_be_as_rough_as_eager_is_but_not_more():
    plan = gpu_check.Plan("cpu", "eager", gpu_check.TINY, 1, ("bfloat16",), ("mlp",), rounds=1)
    (cell,) = cells_of({"eager": lambda model: model}, plan)
    assert 1e-4 < cell.error < 0.1
    assert not cell.failure
    (cell,) = cells_of({"off": lambda model: lambda *inputs: model(*inputs) * 1.2}, plan)
    assert cell.failure.startswith("wrong")


def test_after_the_time_is_up_nothing_is_started():
    plan = gpu_check.Plan("cpu", "eager", gpu_check.TINY, 1, ("float32",), ("one op",), limit_s=-1.0)
    (cell,) = cells_of({"eager": lambda model: pytest.fail("started")}, plan)
    assert cell.failure == "not run: -1 s are over"


def test_an_unknown_workload_is_a_usage_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu_check.arguments(["--workloads", "resnet"])
    assert "accepted: one op, llama, gpt2, vit, mlp" in capsys.readouterr().err


def test_without_machine_code_torch_compile_is_left_out():
    assert list(gpu_check.compilers("eager")) == ["eager", "jointtrace (thunder)", "jointtrace (torch.compile)"]
    assert "torch.compile" in gpu_check.compilers("torch_compile")


@pytest.mark.gpu
def test_memory_on_a_gpu_is_above_the_level_before_the_step():
    weight = torch.ones(2**18, device="cuda", requires_grad=True)
    step = gpu_check.Step(lambda: (weight * 2).sin().cos().sum(), (weight,), ())
    step()
    space = gpu_check.memory_on_gpu(step)
    assert space.kept_bytes == pytest.approx(2 * 2**20, abs=4096)
    assert space.peak_bytes >= 3 * 2**20
