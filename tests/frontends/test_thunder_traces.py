"""Our traces in thunder's history: what `thunder.last_traces` shows, and that it runs."""
from __future__ import annotations

import pytest
import thunder
import torch
import torch.nn.functional as F
from numerics.oracle import jit, leaf

from jointtrace import pipeline


def written(x, w):
    y = torch.sin(x)
    y[0].mul_(2)
    y.reshape(-1).add_(1)
    return y * w


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x


def stages(traces):
    """The passes named in thunder's history, in order."""
    provenance = [str(t.get_provenance()) for t in traces]
    return [p.split("jointtrace: ")[1] for p in provenance if "jointtrace: " in p]


def run(trace, name, *args):
    """Run a trace from its text, as a reader of it would."""
    namespace = dict(trace.python_ctx())
    exec(compile(str(trace), "<trace>", "exec"), namespace)
    return namespace[name](*args)


def test_the_history_shows_every_stage_in_order():
    compiled = jit(written)
    compiled(leaf(3, 3), leaf(3, 3))
    assert stages(thunder.last_traces(compiled)) == ["build_joint", *(name for name, _ in pipeline.PASSES)]
    assert stages(thunder.last_backward_traces(compiled)) == ["split_backward", "dce_backward"]
    joint = next(t for t in thunder.last_traces(compiled) if "build_joint" in str(t.get_provenance()))
    assert "get_grad(" in str(joint)
    assert "fw_flat_out" in str(joint)


def test_every_stage_prints():
    compiled = jit(written, "torch_compile")
    compiled(leaf(3, 3), leaf(3, 3))
    for trace in (*thunder.last_traces(compiled), *thunder.last_backward_traces(compiled)):
        assert "return" in str(trace)


@pytest.mark.parametrize("executor", ["eager", "torch_compile"])
@pytest.mark.parametrize("program", [
    lambda x, w: torch.sin(x @ w) * 2,
    lambda x, w: F.dropout(F.layer_norm(x, (3,), w[0]), 0.3),
    lambda x, w: F.cross_entropy(x @ w, torch.tensor([0, 1, 2])),
    lambda x, w: F.scaled_dot_product_attention(x[None, None], x[None, None], w[None, None]),
    lambda x, w: Scaled.apply(x) * w,
    lambda x, w: torch.narrow(x, 0, 1, 2) * w[:2],
    written,
], ids=["product", "dropout", "loss", "attention", "custom function", "torch's own gradient", "in place"])
def test_the_text_of_both_halves_runs(program, executor):
    x, w = leaf(3, 3), leaf(3, 3)
    compiled = jit(program, executor)
    torch.manual_seed(0)
    out = compiled(x, w)
    out.sum().backward()

    forward = thunder.last_traces(compiled)[-1]
    torch.manual_seed(0)
    result, (tensors, others) = run(forward, "computation", x.detach(), w.detach())
    (found,) = result["flat_output"]
    torch.testing.assert_close(found, out.detach())

    backward = thunder.last_backward_traces(compiled)[-1]
    grads = run(backward, "backward_fn", [list(tensors), list(others)], [torch.ones_like(found)])
    torch.testing.assert_close(tuple(grads), (x.grad, w.grad))


def test_lines_of_the_program_stand_above_what_they_became():
    compiled = jit(written)
    compiled(leaf(3, 3), leaf(3, 3))
    assert "y[0].mul_(2)" in str(thunder.last_traces(compiled)[-1])
