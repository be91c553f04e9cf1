"""Measuring: interleaved timing with paired ratios, and exact memory of one training step."""
from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

MIB = 2**20
FORWARD_DONE = "jointtrace.forward_done"
SILENT = "6"
"""Above the highest level of torch's profiler, which otherwise writes lines of its own to the terminal."""


@dataclass(frozen=True)
class Quartiles:
    """Lower quartile, median and upper quartile of a sample."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Memory:
    """Bytes above the level before the step: still live after the forward, and the most at any time."""

    kept_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Step:
    """One training step without the optimizer: drop the gradients, forward to a scalar loss, backward."""

    model: Callable[..., Tensor]
    parameters: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]

    def __call__(self) -> None:
        self.clear()
        self.loss().backward()

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def loss(self) -> Tensor:
        return self.model(*self.inputs)


def quartiles(sample: Sequence[float]) -> Quartiles:
    """Return the quartiles of `sample`, interpolated; one value stands for all three."""
    if len(sample) == 1:
        return Quartiles(sample[0], sample[0], sample[0])
    return Quartiles(*statistics.quantiles(sample, n=4, method="inclusive"))


def interleave(steps: Mapping[str, Callable[[], object]], rounds: int, repeats: int = 1) -> dict[str, list[float]]:
    """Time every step once per round and return its seconds per round, averaged over `repeats` calls in a row.

    The first round warms up and is dropped. The order turns from round to round: what a step leaves in the caches
    then falls on each of the others alike.
    """
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            step = steps[name]
            start = time.perf_counter()
            for _ in range(repeats):
                step()
            elapsed = time.perf_counter() - start
            if round_:
                seconds[name].append(elapsed / repeats)
    return seconds


def paired_ratio(sample: Sequence[float], reference: Sequence[float]) -> Quartiles:
    """Return the quartiles of `sample[i] / reference[i]`: both of a pair saw the same state of the machine."""
    return quartiles([mine / theirs for mine, theirs in zip(sample, reference, strict=True)])


def memory(step: Step) -> Memory:
    """Run `step` and account for every allocation and free of torch's CPU allocator; it must be compiled already."""
    os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
    step.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = step.loss()
        with record_function(FORWARD_DONE):
            pass
        loss.backward()
    live = peak = kept = 0
    for name, change_bytes in allocations(profiler):
        live += change_bytes
        peak = max(peak, live)
        if name == FORWARD_DONE:
            kept = live
    return Memory(kept, peak)


def allocations(profiler: profile) -> list[tuple[str, int]]:
    """Return (event name, change in bytes) in order of time; the change is 0 for all but allocations and frees.

    Private to torch (2.10 to 2.14): the public event list drops allocations made outside an operator.
    """
    recorded: Any = profiler.profiler  # its stubs lack what follows
    events = sorted(recorded.kineto_results.events(), key=lambda event: event.start_ns())
    return [(event.name(), event.nbytes()) for event in events]


def seconds_of(call: Callable[[], object]) -> float:
    """Run `call` once and return its wall time."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
