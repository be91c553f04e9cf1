"""pipeline: the one order in which a joint trace is improved, claimed and split.

Requires  a joint trace, and the executors that may claim its ops, first come first served.
Ensures   every stage is verified, timed and handed to `on_stage` before the next one starts, so that a record exists
          also when a later stage fails; the pass that broke a trace is named.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from jointtrace.executors.base import Executor
from jointtrace.ir.op import Op, Type
from jointtrace.ir.trace import Trace
from jointtrace.ir.verify import verify
from jointtrace.options import Options
from jointtrace.passes._save import check_overwritten
from jointtrace.passes.cse import cse
from jointtrace.passes.dce import dce
from jointtrace.passes.group_get_grad import group_get_grad
from jointtrace.passes.recompute import recompute
from jointtrace.passes.seed_random import seed_random
from jointtrace.regions.fuse import fuse
from jointtrace.runtime.split import Halves, depends, split

Executors = Sequence[Executor]
Pass = Callable[[Trace, Executors, Options], Trace]


@dataclass(frozen=True)
class Stage:
    """One trace on the way; `seconds` is what the pass took, without verification and recording."""

    name: str
    trace: Trace
    seconds: float
    ops: int


@dataclass(frozen=True)
class Compiled:
    """What `run` made.

    Attributes:
        stages: the joint trace as it came (`joint`), then the result of each pass under its name; a pass that ran on
            one half is called `<pass>_forward` or `<pass>_backward`.
        halves: the last stage of each half.
        depends: for each gradient the positions of the outputs whose cotangents it is computed from.
    """

    stages: tuple[Stage, ...]
    halves: Halves
    depends: tuple[frozenset[int], ...]


PASSES: tuple[tuple[str, Pass], ...] = (
    ("group_get_grad", lambda trace, *_: group_get_grad(trace)),
    # before recompute: repeated values would each be weighed, and saved, on their own
    ("cse", lambda trace, *_: cse(trace)),
    # after cse, which leaves ops that nothing reads; before recompute: what a dead op reads would be saved
    ("dce", lambda trace, *_: dce(trace)),
    # after dce: a dead draw needs no seed; before recompute: what is drawn from a seed can be computed again
    ("seed_random", lambda trace, executors, _: seed_random(trace, fused=partial(_fused, executors))),
    # before fuse: what a region makes inside itself can no longer be saved or left out
    ("recompute", lambda trace, executors, options: recompute(
        trace, fused=in_loops(trace, executors), budget=options.memory_budget, policy=options.policy)),
    # after recompute: forward ops that only the backward read are dead now, and a region would still compute them
    ("dce", lambda trace, *_: dce(trace)),
    ("fuse", lambda trace, executors, _: fuse(trace, executors)),
)
ON_HALVES: tuple[tuple[str, Pass], ...] = (
    # after split: a half must not compute or be handed what only the other one needed
    ("dce", lambda trace, *_: dce(trace)),
    ("fuse", lambda trace, executors, _: fuse(trace, executors)),
)


def run(
    trace: Trace, options: Options, executors: Executors, on_stage: Callable[[Stage], None] | None = None
) -> Compiled:
    """Take a joint trace through every pass that `options` leaves on, then split it.

    With `recompute` switched off, all that the backward reads is saved. With `fuse` switched off no executor is asked,
    so only views are computed again. `on_stage` gets each stage as soon as it exists, a broken one too.

    Raises:
        VerifyError: a pass made a trace that breaks an invariant; the message starts with its name.
        UnsupportedError: the program cannot be compiled.
    """
    recorder = _Recorder(options, on_stage)
    recorder.record("joint", trace, 0.0, check=_check_joint)
    if "fuse" in options.disable:
        executors = ()
    dependence = depends(trace)
    for name, step in PASSES:
        if name not in options.disable and (name != "fuse" or options.late_split):
            trace = recorder.apply(name, step, trace, executors)
    start = perf_counter()
    halves = split(trace)
    recorder.record("split_forward", halves.forward, perf_counter() - start)
    if halves.backward is not None:
        recorder.record("split_backward", halves.backward, 0.0)
    for name, step in ON_HALVES:
        if name not in options.disable and (name != "fuse" or not options.late_split):
            halves = _apply_to_halves(recorder, name, step, halves, executors)
    return Compiled(tuple(recorder.stages), halves, dependence)


def _apply_to_halves(recorder: _Recorder, name: str, step: Pass, halves: Halves, executors: Executors) -> Halves:
    forward = recorder.apply(f"{name}_forward", step, halves.forward, executors)
    backward = halves.backward
    if backward is not None:
        backward = recorder.apply(f"{name}_backward", step, backward, executors)
    return replace(halves, forward=forward, backward=backward)


def in_loops(trace: Trace, executors: Executors) -> Callable[[Op], bool]:
    """Return what says of an op of `trace` whether an executor would compile it with others."""

    def fused(op: Op) -> bool:
        return _fused(executors, op, trace.types)

    return fused


def _fused(executors: Executors, op: Op, types: Mapping[str, Type]) -> bool:
    return next((ex.fuses for ex in executors if ex.can_run(op, types)), False)


def _check_joint(trace: Trace, name: str) -> None:
    check_overwritten(trace)  # the user's fault, with their line; to `verify` it would be ours
    verify(trace, name)


class _Recorder:
    def __init__(self, options: Options, on_stage: Callable[[Stage], None] | None) -> None:
        self.stages: list[Stage] = []
        self._options = options
        self._on_stage = on_stage

    def apply(self, name: str, step: Pass, trace: Trace, executors: Executors) -> Trace:
        """Run one pass and record what it made."""
        start = perf_counter()
        result = step(trace, executors, self._options)
        self.record(name, result, perf_counter() - start)
        return result

    def record(self, name: str, trace: Trace, seconds: float, check: Callable[[Trace, str], None] = verify) -> None:
        stage = Stage(name, trace, seconds, len(trace.ops))
        self.stages.append(stage)
        if self._on_stage is not None:
            self._on_stage(stage)
        check(trace, name)
