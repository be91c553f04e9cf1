"""Time and memory of one training step (forward and backward), ours beside eager, torch.compile and thunder.

`jointtrace` is ours through thunder, `jointtrace-dynamo` ours through torch.compile; `-eager` says that the eager
executor runs the regions.

    python benchmarks/step.py [--model llama|gpt2|vit|mlp] [--layers N] [--dtype float32|bfloat16]

All variants run in one process in turn; ratios are medians of pairs that ran side by side. `floor` is the model's own
matrix products and attention alone. Exit code 1: a figure is missed.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from floor import products_of, replay_of
from harness import RESULTS, Figure, cold_cache, console_of, describe, judge, machine, table_of, write_lines
from models import Workload, build
from rich.console import Console

from jointtrace.demo import variants
from jointtrace.demo.measure import (
    MIB,
    Memory,
    Quartiles,
    Step,
    interleave,
    memory,
    paired_ratio,
    quartiles,
    seconds_of,
)
from jointtrace.errors import OptionError

FLOOR = "floor"
OURS = variants.JOINTTRACE
OURS_EAGER = f"{OURS}-eager"
DYNAMO = f"{OURS}-dynamo"
DYNAMO_EAGER = f"{DYNAMO}-eager"
COMPILERS: dict[str, Callable[[torch.nn.Module], variants.Loss]] = {
    variants.EAGER: lambda model: model,
    variants.TORCH_COMPILE: variants.torch_compile,
    variants.THUNDER: variants.plain_thunder,
    OURS: variants.by_thunder("torch_compile"),
    OURS_EAGER: variants.by_thunder("eager"),
    DYNAMO: variants.by_torch_compile("torch_compile"),
    DYNAMO_EAGER: variants.by_torch_compile("eager"),
}
NEEDS_COMPILER = (variants.TORCH_COMPILE, OURS, DYNAMO)
BY_EXECUTOR = {"torch_compile": (OURS, DYNAMO), "eager": (OURS_EAGER, DYNAMO_EAGER)}
HEADINGS = ("variant", "step ms", "/ torch.compile", "/ eager", "/ floor", "kept MiB", "peak MiB", "first call s")
STEP_LIMITS = (
    (OURS, variants.TORCH_COMPILE, 1.05),
    (OURS_EAGER, variants.EAGER, 1.12),
    (DYNAMO, variants.TORCH_COMPILE, 1.02),
    (DYNAMO_EAGER, variants.EAGER, 1.08),
)
KEPT_LIMITS = ((OURS, 0.80), (DYNAMO, 0.72))
FIGURES_FOR = ("llama", 4, "float32")


@dataclass(frozen=True)
class Result:
    """One variant: seconds of each round, and what a whole step has and the floor has not: memory, a first call."""

    variant: str
    seconds: list[float]
    memory: Memory | None = None
    first_call_s: float | None = None


def select(asked: str, executor: str | None, missing: str | None) -> list[str]:
    """Return the names of the variants to run, in the table's order.

    Raises:
        OptionError: an unknown variant.
    """
    known = [*COMPILERS, FLOOR]
    wanted = known if asked == "all" else asked.split(",")
    for name in wanted:
        if name not in known:
            raise OptionError(f"option variants={name!r}; accepted: all, {', '.join(known)}")
    left_out = {ours for name, both in BY_EXECUTOR.items() if executor not in (None, name) for ours in both}
    left_out |= set(NEEDS_COMPILER) if missing else set()
    return [name for name in known if name in wanted and name not in left_out]


def measure(workload: Workload, names: Sequence[str], rounds: int, console: Console) -> list[Result]:
    """Compile each variant on its own copy of the model, then time all in turn, then account for their memory."""
    module, inputs = workload
    whole: dict[str, Step] = {}
    first_call_s: dict[str, float] = {}
    for name in names:
        if name != FLOOR:
            own = copy.deepcopy(module)
            whole[name] = Step(COMPILERS[name](own), tuple(own.parameters()), inputs)
            first_call_s[name] = seconds_of(whole[name])
            console.print(f"{name}: first call {first_call_s[name]:.1f} s")
    timed: dict[str, Callable[[], None]] = dict(whole)
    if FLOOR in names:
        timed[FLOOR] = replay_of(products_of(Step(module, tuple(module.parameters()), inputs)))
    seconds = interleave(timed, rounds)
    spaces = {name: memory(step) for name, step in whole.items()}
    return [Result(name, seconds[name], spaces.get(name), first_call_s.get(name)) for name in names]


def ratios(results: Sequence[Result], reference: str) -> dict[str, Quartiles]:
    """Return each variant's paired ratio to `reference`; empty where that one did not run."""
    base = next((result.seconds for result in results if result.variant == reference), None)
    return {} if base is None else {result.variant: paired_ratio(result.seconds, base) for result in results}


def record_of(result: Result, over: Mapping[str, Mapping[str, Quartiles]]) -> dict[str, Any]:
    """Return one JSON-able record of a variant."""
    return {
        "variant": result.variant,
        "step_ms": asdict(quartiles([1e3 * second for second in result.seconds])),
        "ratio": {reference: asdict(of[result.variant]) for reference, of in over.items() if of},
        "kept_bytes": result.memory and result.memory.kept_bytes,
        "peak_bytes": result.memory and result.memory.peak_bytes,
        "first_call_s": result.first_call_s,
    }


def cells_of(record: Mapping[str, Any]) -> list[str]:
    """Return one row of the table."""
    over = [record["ratio"].get(name) for name in (variants.TORCH_COMPILE, variants.EAGER, FLOOR)]
    return [
        record["variant"],
        spread(record["step_ms"], ".1f"),
        *("-" if ratio is None else spread(ratio, ".3f") for ratio in over),
        *("-" if record[key] is None else f"{record[key] / MIB:.1f}" for key in ("kept_bytes", "peak_bytes")),
        "-" if record["first_call_s"] is None else f"{record['first_call_s']:.1f}",
    ]


def spread(values: Mapping[str, float], form: str) -> str:
    """Return a median with its quartiles."""
    return f"{values['median']:{form}} [{values['low']:{form}}, {values['high']:{form}}]"


def figures_of(records: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Return the figures that the variants that ran allow."""
    by_name = {record["variant"]: record for record in records}
    figures = []
    for name, reference, limit in STEP_LIMITS:
        if name in by_name and reference in by_name:
            measured = by_name[name]["ratio"][reference]["median"]
            figures.append(Figure(f"step time of {name} over {reference}", measured, limit))
    for name, limit in KEPT_LIMITS:
        if name in by_name and variants.TORCH_COMPILE in by_name:
            kept = by_name[name]["kept_bytes"] / by_name[variants.TORCH_COMPILE]["kept_bytes"]
            figures.append(Figure(f"kept activations of {name} over {variants.TORCH_COMPILE}", kept, limit))
    return figures


def main(
    model: Annotated[Literal["llama", "gpt2", "vit", "mlp"], typer.Option(help="What to train.")] = "llama",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 4,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of weights and inputs.")] = "float32",
    variants_: Annotated[
        str, typer.Option("--variants", help=f"Names with commas between: {', '.join([*COMPILERS, FLOOR])}.")
    ] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each variant.")] = 30,
    executor: Annotated[
        Literal["torch_compile", "eager"] | None, typer.Option(help="Measure ours with this executor only.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch (default: as torch chooses).")] = None,
    json: Annotated[Path, typer.Option(help="File that gets one JSON line per variant.")] = RESULTS / "step.jsonl",
) -> None:
    """Time and memory of one training step (forward and backward), ours beside eager, torch.compile and thunder."""
    if threads:
        torch.set_num_threads(threads)
    console = console_of()
    missing = variants.compiler_missing()
    if missing:
        console.print(f"Without {' and '.join(NEEDS_COMPILER)}: {missing}")
    try:
        names = select(variants_, executor, missing)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error
    facts = machine()
    title = f"{model}, {layers} layers, {dtype}"
    console.print(f"{title}; {describe(facts)}")
    workload = build(model, layers, getattr(torch, dtype))
    with cold_cache():
        results = measure(workload, names, rounds, console)
    over = {reference: ratios(results, reference) for reference in (variants.TORCH_COMPILE, variants.EAGER, FLOOR)}
    setting = {"model": model, "layers": layers, "dtype": dtype}
    records = [{**setting, **record_of(result, over)} for result in results]
    console.print(table_of(title, HEADINGS, [cells_of(record) for record in records]))
    figures = figures_of(records) if (model, layers, dtype) == FIGURES_FOR else []
    write_lines(json, facts, records, figures)
    if not judge(figures, console):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
