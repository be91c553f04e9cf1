"""What a training step keeps and needs at its peak, ours beside torch.compile, eager with checkpoints, and thunder.

    python benchmarks/memory.py [--only llama,autocast,transformers,checkpoints,block,estimate,budgets,dropout]

Bytes are exact, from torch's allocator; times are medians of pairs that ran side by side. In every run the loss and the
gradients are compared with eager's. Exit code 1: a figure is missed.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import budgets
import dropped
import hf_models
import models
import nanogpt
import torch
import typer
from harness import RESULTS, Figure, console_of, describe, judge, machine, table_of, write_lines
from rich.console import Console
from side_by_side import Compiler, Setting, Side, by_thunder, by_torch_compile, checkpointed, side_by_side

from jointtrace.demo import variants
from jointtrace.demo.measure import MIB, quartiles

TORCH_COMPILE, OURS, DYNAMO = variants.TORCH_COMPILE, variants.JOINTTRACE, f"{variants.JOINTTRACE}-dynamo"
BY_HAND = "eager, checkpointed"
DEFAULT: dict[str, Compiler] = {
    TORCH_COMPILE: variants.torch_compile, OURS: by_thunder(), DYNAMO: by_torch_compile(),
}
SMALLEST: dict[str, Compiler] = {
    BY_HAND: checkpointed, OURS: by_thunder(memory_budget=0), DYNAMO: by_torch_compile(memory_budget=0),
}
TOLERANCE = 2e-5
"""Of float32, which carries 6e-8: over four layers, forward and backward, sums are taken in another order."""
BFLOAT16_TOLERANCE = 1.5
"""Over eager's own distance from float32: either rounds to 8 bits in other places, and the largest of many is noise."""
ROUNDS_OF_EQUALS = 5
"""Times the rounds where a limit is the reference's own time: the median of 30 pairs was off by 0.01."""
BLOCK_MIB = 13.5
ATTENTION_MIB = 0.05
"""Of attention's statistics, beside 13.5 of activations: without them a backward runs the attention again."""
ESTIMATED_BY_THUNDER = 741_761_024
PLANNED = ("llama", "gpt2", "vit", "mlp", "Bert")
STEPS = 11  # budgets between 1 and 0
HEADINGS = ("variant", "kept MiB", "peak MiB", "kept / reference", "peak / reference", "step / reference", "error")

Records = list[dict[str, Any]]
Row = Callable[[Setting, Records], list[Figure]]


def llama(setting: Setting, records: Records) -> list[Figure]:
    """The reference Llama in float32."""
    sides = side_by_side(models.build("llama", 4, torch.float32), DEFAULT, setting)
    note("llama", sides, TORCH_COMPILE, setting.console, records)
    figures = []
    for name in (OURS, DYNAMO):
        figures += compared("llama", sides[name], sides[TORCH_COMPILE], 0.70, 1.02)
        figures.append(Figure(f"llama: peak of {name}", sides[name].peak_over(sides[TORCH_COMPILE]), 0.85))
    return figures + errors("llama", sides)


def autocast(setting: Setting, records: Records) -> list[Figure]:
    """The reference Llama under bf16 autocast; errors are distances from the float32 gradients."""
    around = partial(torch.autocast, "cpu", torch.bfloat16)
    setting = replace(setting, around=around, rounds=setting.rounds * ROUNDS_OF_EQUALS)
    compilers = {variants.EAGER: lambda model: model, **DEFAULT}
    sides = side_by_side(models.build("llama", 4, torch.float32), compilers, setting)
    note("llama, bf16 autocast", sides, TORCH_COMPILE, setting.console, records)
    figures = []
    for name in (OURS, DYNAMO):
        figures += compared("autocast", sides[name], sides[TORCH_COMPILE], 0.75, 1.0)
        error = sides[name].error / sides[variants.EAGER].error
        figures.append(Figure(f"autocast: error of {name} over eager's", error, BFLOAT16_TOLERANCE))
    return figures


def transformers(setting: Setting, records: Records) -> list[Figure]:
    """Models of the transformers library; thunder takes part where it can trace them."""
    figures = []
    kept: dict[str, list[float]] = {OURS: [], DYNAMO: []}
    for model in hf_models.MODELS:
        sides = side_by_side(hf_models.build(model), DEFAULT, setting, may_fail={OURS})
        note(model, sides, TORCH_COMPILE, setting.console, records)
        for name in kept:
            if name in sides:
                figures += compared(model, sides[name], sides[TORCH_COMPILE], 1.0, 1.02)
                kept[name].append(sides[name].kept_over(sides[TORCH_COMPILE]))
        figures += errors(model, sides)
    for name, quotients in kept.items():
        if quotients:
            mean = math.exp(sum(map(math.log, quotients)) / len(quotients))
            figures.append(Figure(f"transformers: kept of {name}, mean of {len(quotients)}", mean, 0.80))
    return figures


def checkpoints(setting: Setting, records: Records) -> list[Figure]:
    """The reference Llama within the smallest budget, beside eager with every block in a checkpoint."""
    sides = side_by_side(models.build("llama", 4, torch.float32), SMALLEST, setting)
    note("llama, memory_budget=0", sides, BY_HAND, setting.console, records)
    figures = []
    for name in (OURS, DYNAMO):
        figures += compared("memory_budget=0", sides[name], sides[BY_HAND], 1.0, 0.95)
    return figures + errors("memory_budget=0", sides)


def block(setting: Setting, records: Records) -> list[Figure]:
    """nanoGPT's block, 256 positions: bytes kept, by the fastest plan and within the smallest budget."""
    within = {f"{name}, memory_budget=0": SMALLEST[name] for name in (OURS, DYNAMO)}
    compilers = {variants.EAGER: lambda model: model, **DEFAULT, **within}
    sides = side_by_side(nanogpt.workload(256), compilers, replace(setting, rounds=0))
    note("nanoGPT block", sides, variants.EAGER, setting.console, records)
    limits = {OURS: BLOCK_MIB + ATTENTION_MIB, DYNAMO: BLOCK_MIB + ATTENTION_MIB, **dict.fromkeys(within, BLOCK_MIB)}
    return [*(Figure(f"block: kept of {name}", sides[name].memory.kept_bytes / MIB, limit, "MiB")
              for name, limit in limits.items()), *errors("block", sides)]


def estimate(setting: Setting, records: Records) -> list[Figure]:
    """nanoGPT's block, 1024 positions: the backward's peak by thunder's estimator."""
    theirs = nanogpt.planned_by_thunder()
    figures = [Figure("estimate: thunder 0.2.6 off what its test says", abs(theirs - ESTIMATED_BY_THUNDER), 0, "bytes")]
    rows = [["thunder 0.2.6", "decomposed", f"{theirs:,}", "-"]]
    for executor in ("torch_compile", "eager"):
        for fused, limit in ((False, 437_292_032), (True, 250_000_000)):
            attention = "fused" if fused else "decomposed"
            ours = nanogpt.planned_by_ours(executor, fused_attention=fused)
            rows.append([executor, attention, f"{ours.unclaimed:,}", f"{ours.claimed:,}"])
            records.append({"row": "estimate", "executor": executor, "attention": attention, **asdict(ours)})
            if executor == "torch_compile":
                name = f"estimate: backward peak, attention {attention}"
                figures.append(Figure(name, ours.unclaimed, limit, "bytes"))
    setting.console.print(table_of("Planned backward peak, bytes", (
        "executor", "attention", "every value counts", "regions opaque"), rows))
    return figures


def planned(setting: Setting, records: Records) -> list[Figure]:
    """The planned peak as the budget goes from 1 to 0."""
    steps = [1 - i / (STEPS - 1) for i in range(STEPS)]
    figures, rows = [], []
    for model in PLANNED:
        ours = model in models.MODELS
        workload = models.build(model, 4, torch.float32) if ours else hf_models.build(model)
        for executor in ("eager", "torch_compile"):
            joint = budgets.joint_of(workload, executor)
            plans = budgets.plans(joint, executor, steps)
            peaks = [peak / MIB for peak in plans.peak_bytes]
            rows.append([f"{model}, {executor}", *(f"{peak:.1f}" for peak in peaks), f"{plans.seconds:.1f}"])
            records.append({"row": "budgets", "model": model, "executor": executor, **asdict(plans)})
            rise = max(later - earlier for earlier, later in pairwise(peaks))
            figures.append(Figure(f"budgets: largest rise, {model}, {executor}", rise, 0.0, "MiB"))
            setting.console.print(f"  {' '.join(rows[-1])} s")
    headings = ("planned peak, MiB", *(f"{budget:.1f}" for budget in steps), "pass, s")
    setting.console.print(table_of("Budgets", headings, rows))
    return figures


def dropout(setting: Setting, records: Records) -> list[Figure]:
    """Gradients at every budget for the masks that the forward drew, by differences of the forward's own loss."""
    figures = []
    for front_end, compile_ in {OURS: by_thunder, DYNAMO: by_torch_compile}.items():
        for budget in (0, 0.25, 0.5, 0.75, 1):
            error = dropped.error_of(compile_(memory_budget=budget))
            records.append({"row": "dropout", "front end": front_end, "budget": budget, "error": error})
            figures.append(Figure(f"dropout: gradient of {front_end}, budget {budget}", error, dropped.TOLERANCE, ""))
            setting.console.print(f"  {front_end}, budget {budget}: error {error:.1e}")
    return figures


def compared(row: str, ours: Side, reference: Side, kept: float, time: float) -> list[Figure]:
    """Return the figures for kept bytes and, where they were timed, for step time."""
    figures = [Figure(f"{row}: kept of {ours.variant}", ours.kept_over(reference), kept)]
    if ours.seconds:
        figures.append(Figure(f"{row}: step of {ours.variant}", ours.time_over(reference), time))
    return figures


def errors(row: str, sides: Mapping[str, Side]) -> list[Figure]:
    """Return one figure for the largest error of our variants; Inductor's own may be what torch.compile's is."""
    error = max(side.error for name, side in sides.items() if variants.is_ours(name))
    theirs = sides[TORCH_COMPILE].error if TORCH_COMPILE in sides else 0.0
    return [Figure(f"{row}: loss and gradients off eager's, 1e-6", 1e6 * error, 1e6 * max(TOLERANCE, 1.1 * theirs), "")]


def note(row: str, sides: Mapping[str, Side], reference: str, console: Console, records: Records) -> None:
    """Print one row's table and add its records."""
    base, cells = sides[reference], []
    for side in sides.values():
        time = f"{side.time_over(base):.3f}" if side.seconds else "-"
        cells.append([side.variant, f"{side.memory.kept_bytes / MIB:.2f}", f"{side.memory.peak_bytes / MIB:.2f}",
                      f"{side.kept_over(base):.3f}", f"{side.peak_over(base):.3f}", time, f"{side.error:.1e}"])
        step_ms = asdict(quartiles([1e3 * second for second in side.seconds])) if side.seconds else None
        records.append({"row": row, "variant": side.variant, "error": side.error, "step_ms": step_ms,
                        "reference": reference, **asdict(side.memory)})
    console.print(table_of(f"{row}; reference: {reference}", HEADINGS, cells))


ROWS: dict[str, Row] = {
    "llama": llama, "autocast": autocast, "transformers": transformers, "checkpoints": checkpoints, "block": block,
    "estimate": estimate, "budgets": planned, "dropout": dropout,
}


def chosen(only: str | None) -> list[str]:
    """Return the rows to run, in the table's order.

    Raises:
        BadParameter: an unknown row.
    """
    wanted = list(ROWS) if only is None else only.split(",")
    for name in wanted:
        if name not in ROWS:
            raise typer.BadParameter(f"only={name!r}; accepted: {', '.join(ROWS)}")
    return [name for name in ROWS if name in wanted]


def main(
    only: Annotated[str | None, typer.Option(help=f"Rows with commas between: {', '.join(ROWS)}.")] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Timed calls of each variant; 0 times nothing.")] = 30,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch (default: as torch chooses).")] = None,
    json: Annotated[Path, typer.Option(help="File that gets the JSON lines of each row as it ends.")] =
    RESULTS / "memory.jsonl",
) -> None:
    """What a training step keeps and needs at its peak, ours beside torch.compile, checkpoints and thunder."""
    if threads:
        torch.set_num_threads(threads)
    console, facts = console_of(), machine()
    names = chosen(only)
    if missing := variants.compiler_missing():
        raise typer.BadParameter(f"these figures are those of compiled regions: {missing}")
    console.print(describe(facts))
    figures: list[Figure] = []
    for name in names:
        console.print(f"{name}: {ROWS[name].__doc__}")
        records: Records = []
        torch.manual_seed(0)
        found = ROWS[name](Setting(rounds, console), records)
        write_lines(json, facts, records, found)
        figures += found
    if not judge(figures, console):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
