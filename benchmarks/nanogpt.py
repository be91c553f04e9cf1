"""The transformer block of nanoGPT, and its planned memory in the terms of thunder's own estimator.

Holds for lightning-thunder 0.2.6: its test `test_nanogpt_block` gives the model, the terms and its own figure. The
estimator frees nothing of what the forward saved before the backward ends, and does not look into compiled regions.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import models  # imports jointtrace, without which thunder cannot be imported
import thunder
import torch
from thunder.core.trace import TraceCtx
from thunder.examine.memory_calculation import get_alloc_memory
from thunder.executors.passes import del_last_used
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from jointtrace.frontends.thunder_traces import backward_trace
from jointtrace.runtime.record import records_of

BATCH = 2
CONTEXT = 1024


class Summed(nn.Module):
    """A module whose loss is the sum of its output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.module(x_BTD).sum()


def block() -> nn.Module:
    """Return the block: width 768, 12 heads, biases, no dropout."""
    from thunder.tests.nanogpt_model import Block, GPTConfig

    torch.manual_seed(0)
    return Block(GPTConfig(dropout=0.0, block_size=CONTEXT))


def workload(context: int) -> models.Workload:
    """Return the block with its loss, and an input whose gradient is asked for."""
    module = Summed(block())
    return module, (torch.randn(BATCH, context, 768, requires_grad=True),)


def planned_by_thunder() -> int:
    """Return what thunder 0.2.6 plans for its backward, in bytes."""
    step = thunder.jit(block(), executors=["torch"])
    return backward_bytes(step, thunder.last_backward_traces)


@dataclass(frozen=True)
class Planned:
    """Peak bytes of a backward.

    Attributes:
        unclaimed: before executors claim it: every value between two operations counts, also where a compiled loop
            passes it on without memory.
        claimed: as it runs; what is inside a region does not count.
    """

    unclaimed: int
    claimed: int


def planned_by_ours(executor: str, *, fused_attention: bool) -> Planned:
    """Return what our backward needs at its peak."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if fused_attention else SDPBackend.MATH):
        return Planned(*(
            backward_bytes(thunder.jit(block(), delay_trace_split=late, jointtrace={"executors": (executor,)}), traces)
            for late, traces in ((False, unclaimed), (True, thunder.last_backward_traces))))


def unclaimed(step: Any) -> list[TraceCtx]:
    """Return the backward as it was before executors claimed it, in the form in which thunder runs it."""
    record = records_of(thunder.compile_stats(step))[-1]
    assert record.halves is not None
    backward = next(stage.trace for stage in record.stages if stage.name == "dce_backward")

    def backward_fn(saved_for_backward: Any, cotangents: Any) -> None: ...

    trace = backward_trace(replace(record.halves, backward=backward), backward_fn)
    return [del_last_used(trace, clear_mutable_collections=True)]


def backward_bytes(step: Any, traces: Callable[[Any], list[TraceCtx]]) -> int:
    """Return the estimator's peak of the last backward trace of a block that has run once."""
    step(torch.randn(BATCH, CONTEXT, 768, requires_grad=True))
    return get_alloc_memory(traces(step)[-1])[0]
