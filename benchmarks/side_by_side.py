"""One training step of one model by several compilers in one process: times, memory, and how far from eager's."""
from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from models import Workload  # imports jointtrace, without which thunder cannot be imported
from rich.console import Console
from thunder import jit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jointtrace.demo.measure import MIB, Memory, Step, interleave, memory, paired_ratio, seconds_of

Compiler = Callable[[nn.Module], Callable[..., Tensor]]
SMALLEST_SCALE = 1e-3
"""Of a gradient, over the model's largest: the bias of attention's keys has the gradient 0, and what eager gives for it
is rounding."""


@dataclass(frozen=True)
class Setting:
    """How models are run.

    Attributes:
        rounds: timed calls of each variant.
        console: where progress is printed.
        around: makes the context in which forwards run; backwards run outside of it.
    """

    rounds: int
    console: Console
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Side:
    """One variant: bytes, seconds of each round, and the largest error of its loss and gradients."""

    variant: str
    memory: Memory
    error: float
    seconds: list[float] = field(default_factory=list)

    def kept_over(self, other: Side) -> float:
        """Return the quotient of the bytes kept after the forward."""
        return self.memory.kept_bytes / other.memory.kept_bytes

    def peak_over(self, other: Side) -> float:
        """Return the quotient of the peaks."""
        return self.memory.peak_bytes / other.memory.peak_bytes

    def time_over(self, other: Side) -> float:
        """Return the median of the paired ratios of step times."""
        return paired_ratio(self.seconds, other.seconds).median


def by_thunder(**options: Any) -> Compiler:
    """Return a function that compiles a model by thunder through our joint trace."""
    return lambda model: jit(model, delay_trace_split=True, jointtrace=options)


def by_torch_compile(**options: Any) -> Compiler:
    """Return a function that compiles a model by torch.compile through our joint trace, as one graph."""
    return lambda model: torch.compile(model, backend="jointtrace", options=options, fullgraph=True, dynamic=False)


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Tensor) -> Tensor:
        return checkpoint(self.block, *inputs, use_reentrant=False)


def checkpointed(model: Any) -> nn.Module:
    """Put every block of a model into a checkpoint of its own."""
    model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    return model


def side_by_side(
    workload: Workload, compilers: Mapping[str, Compiler], setting: Setting, may_fail: Set[str] = frozenset()
) -> dict[str, Side]:
    """Compile each variant on a copy of the model, compare it with eager's float32 step, then time all in turn.

    A variant in `may_fail` that cannot be compiled is left out, with a line that says why.
    """
    module, inputs = workload
    expected = results_of(Step(module, tuple(module.parameters()), inputs))
    steps: dict[str, Step] = {}
    sides: dict[str, Side] = {}
    for name, compile_ in compilers.items():
        own = copy.deepcopy(module)
        step = Step(in_context(compile_(own), setting.around), tuple(own.parameters()), inputs)
        try:
            seconds = seconds_of(step)
        except Exception as error:  # whatever a compiler makes of a model that it does not know
            if name not in may_fail:
                raise
            setting.console.print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0]}", markup=False)
            continue
        steps[name] = step
        sides[name] = Side(name, memory(step), error_of(results_of(step), expected))
        used = sides[name].memory
        setting.console.print(f"  {name}: first call {seconds:.1f} s, kept {used.kept_bytes / MIB:.2f} MiB, peak "
                              f"{used.peak_bytes / MIB:.2f} MiB, error {sides[name].error:.1e}")
    times = interleave(steps, setting.rounds) if setting.rounds else {}
    return {name: replace(side, seconds=times.get(name, [])) for name, side in sides.items()}


def in_context(
    model: Callable[..., Tensor], around: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Tensor]:
    """Return `model` called inside of a context."""

    def call(*inputs: Tensor) -> Tensor:
        with around():
            return model(*inputs)

    return call


def results_of(step: Step) -> list[Tensor]:
    """Run one step and return copies of the loss and of every gradient."""
    step.clear()
    loss = step.loss()
    loss.backward()
    return [loss.detach().clone(), *(parameter.grad.clone() for parameter in step.parameters
                                     if parameter.grad is not None)]


def error_of(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of a loss or gradient over that tensor's largest value."""
    if len(results) != len(expected):
        return torch.inf  # a gradient is missing
    smallest = SMALLEST_SCALE * max(float(tensor.abs().max()) for tensor in expected[1:])
    return max(float((ours.double() - theirs.double()).abs().max()) / max(float(theirs.abs().max()), smallest)
               for ours, theirs in zip(results, expected, strict=True))
