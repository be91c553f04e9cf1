"""Everything at once on one GPU, in under 8 minutes: both front ends beside eager and torch.compile.

    python benchmarks/gpu_check.py

Four models and a module of one operation (what its step takes is call overhead), float32 and bfloat16: correctness,
step time, kept bytes, peak, seconds of the first call. Needs torch, thunder, igraph and this package, nothing else. A
cell that fails says so in its row and the rest goes on. On a CPU it is a small version of itself: tiny models, float32,
the eager executor. Exit code 1: a cell failed, is wrong, or did not fit into the time.
"""
from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, cold_cache, describe, machine, write_lines
from models import LARGE, MODELS, TINY, Sizes, Workload, build
from torch import Tensor, nn

from jointtrace.demo import variants
from jointtrace.demo.measure import MIB, Memory, Step, memory, quartiles

ONE_OP = "one op"
ONE_OP_CALLS = 100
WORKLOADS = (ONE_OP, *MODELS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}
"""Most that loss and gradients may be off, relative to their norm, beyond twice what eager's are off."""
COLUMNS = (("workload", 9), ("dtype", 9), ("variant", 27), ("step ms", 10), ("/ eager", 8), ("/ compile", 10),
           ("kept MiB", 10), ("peak MiB", 10), ("first call s", 13), ("error", 9), ("", 0))


@dataclass(frozen=True)
class Plan:
    """What is measured and how often; times in seconds."""

    device: str
    executor: str
    sizes: Sizes
    layers: int
    dtypes: tuple[str, ...]
    workloads: tuple[str, ...] = WORKLOADS
    rounds: int = 10
    limit_s: float = 420.0  # the last cell may take another minute


@dataclass(frozen=True)
class Cell:
    """One variant on one workload in one dtype; `failure` says why nothing, or something wrong, came out."""

    workload: str
    dtype: str
    variant: str
    step_ms: float | None = None
    memory: Memory | None = None
    first_call_s: float | None = None
    error: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class Truth:
    """Loss and gradients computed in float32 from the same weights, and how far eager is from them."""

    results: tuple[Tensor, ...]
    eager_error: float


class OneOp(nn.Module):
    """One multiplication; the sum makes it a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


def plan_of(device: str) -> Plan:
    """Return what is measured on a device unless the command line says otherwise."""
    if device == "cuda":
        return Plan(device, "torch_compile", LARGE, 2, tuple(DTYPES))
    return Plan(device, "eager", TINY, 1, ("float32",), rounds=3)


def compilers(executor: str) -> dict[str, Callable[[nn.Module], variants.Loss]]:
    """Return the variants, eager first; torch.compile only where ours compiles machine code too."""
    ways: dict[str, Callable[[nn.Module], variants.Loss]] = {variants.EAGER: lambda model: model}
    if executor != "eager":
        ways[variants.TORCH_COMPILE] = variants.torch_compile
    ways[variants.OURS_BY_THUNDER] = variants.by_thunder(executor)
    ways[variants.OURS_BY_TORCH_COMPILE] = variants.by_torch_compile(executor)
    return ways


def cells(plan: Plan, ways: Mapping[str, Callable[[nn.Module], variants.Loss]]) -> Iterator[Cell]:
    """Measure every cell in turn; once the time is up, say of the others that they were not run."""
    end = time.monotonic() + plan.limit_s
    for workload in plan.workloads:
        for dtype in plan.dtypes:
            truth: Truth | None = None
            for name, way in ways.items():
                cell = Cell(workload, dtype, name)
                if time.monotonic() > end:
                    yield replace(cell, failure=f"not run: {plan.limit_s:g} s are over")
                    continue
                try:
                    truth = truth or truth_of(plan, workload, dtype)
                    yield judged(measured(plan, cell, way, truth), truth)
                except Exception as error:  # noqa: BLE001  what fails is a result, and the next cell may not
                    yield replace(cell, failure=f"{type(error).__name__}: {error}".splitlines()[0])


def workload_of(plan: Plan, name: str, dtype: str) -> Workload:
    """Return a model and its inputs on the device, the same at every call."""
    if name == ONE_OP:
        model, inputs = OneOp(), (torch.linspace(0, 1, 8),)
        model, inputs = model.to(DTYPES[dtype]), tuple(x.to(DTYPES[dtype]) for x in inputs)
    else:
        model, inputs = build(name, plan.layers, DTYPES[dtype], sizes=plan.sizes)
    return model.to(plan.device), tuple(x.to(plan.device) for x in inputs)


def truth_of(plan: Plan, workload: str, dtype: str) -> Truth:
    """Return loss and gradients of the model in float32, and eager's distance from them."""
    model, inputs = workload_of(plan, workload, dtype)
    exact = copy.deepcopy(model).float()
    step = Step(exact, tuple(exact.parameters()), tuple(x.float() if x.is_floating_point() else x for x in inputs))
    results = results_of(step)
    return Truth(results, distance(results_of(Step(model, tuple(model.parameters()), inputs)), results))


def results_of(step: Step) -> tuple[Tensor, ...]:
    """Return the loss, and the gradients as one vector, in float32."""
    step.clear()
    loss = step.loss()
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in step.parameters]
    return loss.detach().float(), torch.cat([grad.float().flatten() for grad in grads])


def distance(results: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Return the larger of the relative distances of loss and gradients, each by its norm; a NaN stays one."""
    apart = [((a - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in zip(results, truth, strict=True)]
    return next((value for value in apart if value != value), max(apart))


def measured(plan: Plan, cell: Cell, way: Callable[[nn.Module], variants.Loss], truth: Truth) -> Cell:
    """Compile the workload in one way and measure it."""
    torch.compiler.reset()
    model, inputs = workload_of(plan, cell.workload, cell.dtype)
    step = Step(way(model), tuple(model.parameters()), inputs)
    start = time.perf_counter()
    step()
    synchronize(plan.device)
    first_call_s = time.perf_counter() - start
    error = distance(results_of(step), truth.results)
    repeats = ONE_OP_CALLS if cell.workload == ONE_OP else 1
    step_ms = 1e3 * seconds_of(plan, step, repeats)
    space = memory_on_gpu(step) if plan.device == "cuda" else memory(step)
    return replace(cell, step_ms=step_ms, memory=space, first_call_s=first_call_s, error=error)


def judged(cell: Cell, truth: Truth) -> Cell:
    """Return `cell`, failed where its error is larger than its dtype explains."""
    allowed = 2 * truth.eager_error + TOLERANCE[cell.dtype]
    assert cell.error is not None
    if cell.error <= allowed:
        return cell
    return replace(cell, failure=f"wrong: error {cell.error:.1e}, {allowed:.1e} allowed")


def seconds_of(plan: Plan, step: Step, repeats: int) -> float:
    """Return the median time of a step over the rounds, each of `repeats` steps and all the work of the device."""
    sample = []
    for round_ in range(plan.rounds + 1):
        synchronize(plan.device)
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        synchronize(plan.device)
        if round_:  # the first one warms up
            sample.append((time.perf_counter() - start) / repeats)
    return quartiles(sample).median


def memory_on_gpu(step: Step) -> Memory:
    """Return what a step keeps after its forward and the most it has, above the level before it."""
    step.clear()
    synchronize("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = step.loss()
    synchronize("cuda")
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    synchronize("cuda")
    return Memory(kept, torch.cuda.max_memory_allocated() - before)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def row_of(cell: Cell, base: Mapping[str, float]) -> str:
    """Return the cell's line of the table; `base` has the step times of eager and torch.compile."""
    ratios = [None if cell.step_ms is None or name not in base else cell.step_ms / base[name]
              for name in (variants.EAGER, variants.TORCH_COMPILE)]
    space = cell.memory
    texts = (cell.workload, cell.dtype, cell.variant, number(cell.step_ms, ".3f"), *(number(r, ".2f") for r in ratios),
             number(space and space.kept_bytes / MIB, ".2f"), number(space and space.peak_bytes / MIB, ".2f"),
             number(cell.first_call_s, ".1f"), number(cell.error, ".1e"), cell.failure and f"FAILED {cell.failure}")
    return line_of(texts)


def number(value: float | None, form: str) -> str:
    """Return a number as text, or a dash."""
    return "-" if value is None else f"{value:{form}}"


def line_of(texts: Sequence[str]) -> str:
    """Return one line of the table: three columns of words, then numbers, then what went wrong."""
    padded = [text.ljust(width) if column < 3 or not width else text.rjust(width)
              for column, (text, (_, width)) in enumerate(zip(texts, COLUMNS, strict=True))]
    return " ".join(padded).rstrip()


def device_name(device: str) -> str:
    """Return the name of the GPU, or `cpu`."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def arguments(given: Sequence[str] | None = None) -> tuple[Plan, Path]:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    plan = plan_of("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workloads", default=",".join(plan.workloads), help="names with commas between")
    parser.add_argument("--dtypes", default=",".join(plan.dtypes), help="float32, bfloat16")
    parser.add_argument("--executor", default=plan.executor, choices=("torch_compile", "eager"))
    parser.add_argument("--layers", type=int, default=plan.layers)
    parser.add_argument("--rounds", type=int, default=plan.rounds, help="timed rounds of each cell")
    parser.add_argument("--limit-s", type=float, default=plan.limit_s, help="seconds after which no cell is started")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu_check.jsonl", help="file that gets a line per cell")
    asked = parser.parse_args(given)
    workloads, dtypes = tuple(asked.workloads.split(",")), tuple(asked.dtypes.split(","))
    for name, values, known in (("workloads", workloads, WORKLOADS), ("dtypes", dtypes, DTYPES)):
        if not set(values) <= set(known):
            parser.error(f"{name}={','.join(values)}; accepted: {', '.join(known)}")
    return replace(plan, workloads=workloads, dtypes=dtypes, executor=asked.executor, layers=asked.layers,
                   rounds=asked.rounds, limit_s=asked.limit_s), asked.json


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print the table as it comes, write JSON lines, and return the exit code."""
    warnings.filterwarnings("ignore")
    with torch.backends.cudnn.flags(torch.backends.cudnn.enabled, allow_tf32=False):  # else all are as rough as it
        return _measure(given)


def _measure(given: Sequence[str] | None) -> int:
    plan, path = arguments(given)
    facts: dict[str, Any] = {**machine(), "device": device_name(plan.device)}
    print(describe(facts))
    print(f"executor {plan.executor}, {plan.layers} layers, {asdict(plan.sizes)}")
    print(line_of([heading for heading, _ in COLUMNS]))
    found: list[Cell] = []
    base: dict[tuple[str, str], dict[str, float]] = {}
    with cold_cache():
        for cell in cells(plan, compilers(plan.executor)):
            steps = base.setdefault((cell.workload, cell.dtype), {})
            if cell.step_ms is not None:
                steps[cell.variant] = cell.step_ms
            print(row_of(cell, steps), flush=True)
            found.append(cell)
    write_lines(path, facts, map(asdict, found), [])
    failed = sum(bool(cell.failure) for cell in found)
    print(f"{len(found) - failed} of {len(found)} cells right; JSON lines in {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
