"""Gradients within a memory budget, with dropout on: exact for the masks that the forward drew."""
from __future__ import annotations

import copy

import pytest
import thunder
import torch
import torch.nn.functional as F
from numerics.oracle import leaf
from torch import nn

import jointtrace

BUDGETS = (0, 0.25, 0.5, 0.75, 1)
P = 0.3


class Dropping(nn.Module):
    """Layers with dropout; returns the loss, and which elements each dropout let through."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x):
        masks = []
        for layer in self.layers:
            passed = F.dropout(F.gelu(layer(x)).exp(), P)  # never 0 but where it was dropped
            masks.append(passed != 0)
            x = x + passed
        return x.square().mean(), masks

    def given(self, x, masks):
        for layer, mask in zip(self.layers, masks, strict=True):
            x = x + F.gelu(layer(x)).exp() * mask / (1 - P)
        return x.square().mean()


def compiled(frontend, module, **options):
    if frontend == "thunder":
        return thunder.jit(module, delay_trace_split=True, jointtrace=options)
    torch._dynamo.reset()
    return torch.compile(module, backend="jointtrace", options=options)


@pytest.mark.parametrize("frontend", ["thunder", "dynamo"])
@pytest.mark.parametrize(("executor", "budget"), [
    *(("eager", budget) for budget in BUDGETS), ("torch_compile", 0), ("torch_compile", 1)])
def test_gradients_within_a_budget_are_exact_for_the_masks_that_the_forward_drew(frontend, executor, budget):
    module, x = Dropping().double(), leaf(16, 24, dtype=torch.float64)
    expected, same_x = copy.deepcopy(module), x.detach().clone().requires_grad_()
    step = compiled(frontend, module, executors=(executor,), memory_budget=budget)
    loss, masks = step(x)
    loss.backward()
    known = expected.given(same_x, masks)
    known.backward()
    assert 0 < sum(int(mask.sum()) for mask in masks) < sum(mask.numel() for mask in masks)
    torch.testing.assert_close(loss, known)
    torch.testing.assert_close([x.grad, *(p.grad for p in module.parameters())],
                               [same_x.grad, *(p.grad for p in expected.parameters())])
    if budget == 0:
        assert "%bw_" in jointtrace.dump(step, stage="recompute")
