"""check mode: what is right passes, nothing of the user's is changed, and nothing is kept."""
from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from checking.planting import compiled_by, plant
from checking.test_planted_faults import BOTH, Block
from numerics.oracle import leaf, weighted_sum
from torch.multiprocessing.reductions import StorageWeakRef

from jointtrace.errors import CheckError, OptionError
from jointtrace.executors.torch_compile import InductorRegion
from jointtrace.joint import build, rules
from jointtrace.options import Options


@BOTH
@pytest.mark.parametrize("executor", ["eager", "torch_compile"])
def test_a_right_model_passes_with_the_same_numbers_and_random_state(frontend, executor):
    found = []
    for check in (True, False):
        torch.manual_seed(3)
        model = Block()
        compiled = compiled_by(frontend, model, executor, check=check)
        for _ in range(2):
            weighted_sum(compiled(torch.ones(5, 6))).backward()
        found.append([torch.rand(3), *model.buffers(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@BOTH
def test_nan_is_no_difference_to_nan(frontend):
    compiled = compiled_by(frontend, lambda x: (x - 2).sqrt() * x)
    x = torch.ones(3, requires_grad=True)
    compiled(x).sum().backward()
    assert x.grad.isnan().all()


@BOTH
def test_nothing_of_a_checked_call_is_kept(frontend):
    compiled = compiled_by(frontend, lambda x: x.sin() * x)
    x = leaf(4)
    held = StorageWeakRef(x.untyped_storage())
    out = compiled(x)
    out.sum().backward()
    del x, out
    gc.collect()
    assert held.expired()


@BOTH
def test_a_backward_is_checked_also_where_the_caller_wrote_to_an_input_meanwhile(frontend, monkeypatch):
    from jointtrace.checking import monitor

    checked = []
    check = monitor.Monitor.check
    monkeypatch.setattr(monitor.Monitor, "check", lambda self, *args: checked.append(args[2]) or check(self, *args))
    compiled = compiled_by(frontend, lambda x, state: x.sin() + state)
    x, state = leaf(4), torch.ones(4)
    out = compiled(x, state)
    state.zero_()
    out.sum().backward()
    assert [cotangents is not None for cotangents in checked] == [False, True]


def test_a_region_that_computes_something_else_is_named_with_its_executor(monkeypatch):
    run = InductorRegion.boxed
    monkeypatch.setattr(InductorRegion, "boxed", lambda self, args: tuple(made + 1 for made in run(self, args)))
    compiled = compiled_by("thunder", lambda x: x.sin().cos(), "torch_compile")
    with pytest.raises(CheckError, match="region torch_compile_0_fw, compiled by torch_compile, computes something"):
        compiled(leaf(4))


def test_an_output_that_lost_its_requires_grad_is_called_so(monkeypatch):
    finish = build.Walk.finish

    def forgetful(walk):
        joint = finish(walk)
        return replace(joint, differentiable=(False, *joint.differentiable[1:]))

    monkeypatch.setattr(build.Walk, "finish", forgetful)
    compiled = compiled_by("thunder", lambda x: (x.sin(), x.cos()))
    with pytest.raises(CheckError, match="output 0 differs from eager: requires_grad is False, should be True"):
        compiled(leaf(4))


@BOTH
def test_a_gradient_that_a_pass_lost_is_called_so(frontend, monkeypatch):
    plant(monkeypatch, "cse", lambda before, after: replace(after, grads=(None, *after.grads[1:])))
    with pytest.raises(CheckError, match=r"gradient of input .* differs from eager: None, should be a value"):
        compiled_by(frontend, lambda x, y: x.sin() * y)(leaf(4), leaf(4)).sum().backward()


def test_the_script_needs_no_more_than_the_files_it_came_with(monkeypatch, tmp_path):
    monkeypatch.setenv("JOINTTRACE_DUMP", str(tmp_path))
    monkeypatch.setattr(rules, "silu_backward", lambda g, a: g * 2)
    with pytest.raises(CheckError) as raised:
        compiled_by("thunder", torch.nn.SiLU())(leaf(4)).sum().backward()
    assert raised.value.script.startswith(str(tmp_path))
    done = subprocess.run([sys.executable, "-W", "ignore", raised.value.script], capture_output=True, text=True,
                          check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "gradient of input" in done.stdout
    assert "build_joint" in done.stdout


@pytest.mark.parametrize("value", ["strict", True, ()])
def test_another_check_is_refused(value):
    with pytest.raises(OptionError, match="accepted: None, 'eager'"):
        Options.parse({"check": value})
