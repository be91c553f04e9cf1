"""Call overhead: forward and backward of a module that does one multiplication, in microseconds.

    python benchmarks/overhead.py

Blocks of calls alternate between the variants; ratios are medians over pairs of blocks.
Exit code 1: the figure is missed.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from harness import RESULTS, Figure, console_of, describe, judge, machine, table_of, write_lines
from torch import Tensor, nn

from jointtrace.demo import variants
from jointtrace.demo.measure import interleave, paired_ratio, quartiles

ELEMENTS = 8
OURS_EAGER = f"{variants.JOINTTRACE}-eager"
DYNAMO = f"{variants.JOINTTRACE}-dynamo"
DYNAMO_EAGER = f"{DYNAMO}-eager"
LIMITS = ((variants.JOINTTRACE, 1.6), (DYNAMO, 1.10))
HEADINGS = ("variant", "us per call", "lower quartile", "upper quartile", "/ torch.compile")


class Scale(nn.Module):
    """One operation on one parameter: what remains of the time is overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ELEMENTS))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def compilers(missing: str | None) -> dict[str, Callable[[nn.Module], variants.Loss]]:
    """Return the ways to compile the module; without a C++ compiler those that need none."""
    ways: dict[str, Callable[[nn.Module], variants.Loss]] = {
        variants.EAGER: lambda model: model,
        variants.THUNDER: variants.plain_thunder,
        OURS_EAGER: variants.by_thunder("eager"),
        DYNAMO_EAGER: variants.by_torch_compile("eager"),
    }
    if missing is None:
        ways[variants.TORCH_COMPILE] = variants.torch_compile
        ways[variants.JOINTTRACE] = variants.by_thunder("torch_compile")
        ways[DYNAMO] = variants.by_torch_compile("torch_compile")
    return ways


def call_of(compiler: Callable[[nn.Module], variants.Loss]) -> Callable[[], None]:
    """Return one call of the compiled module: drop the gradient, forward, backward."""
    module = Scale()
    model = compiler(module)
    x, cotangent = torch.randn(ELEMENTS), torch.randn(ELEMENTS)

    def call() -> None:
        module.weight.grad = None
        model(x).backward(cotangent)

    return call


def rows_of(seconds: Mapping[str, Sequence[float]]) -> list[tuple[str, ...]]:
    """Return one row of the table per variant."""
    base = seconds.get(variants.TORCH_COMPILE)
    rows = []
    for name, sample in seconds.items():
        time_us = quartiles([1e6 * second for second in sample])
        ratio = "-" if base is None else f"{paired_ratio(sample, base).median:.2f}"
        rows.append((name, f"{time_us.median:.1f}", f"{time_us.low:.1f}", f"{time_us.high:.1f}", ratio))
    return rows


def figures_of(seconds: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Return a figure for each front end of ours, where both of its variants ran."""
    base = seconds.get(variants.TORCH_COMPILE)
    if base is None:
        return []
    ratios = {name: paired_ratio(sample, base).median for name, sample in seconds.items()}
    return [
        Figure(f"call overhead of {name} over {variants.TORCH_COMPILE}", ratios[name], limit)
        for name, limit in LIMITS
        if name in seconds
    ]


def main(
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of each variant.")] = 100,
    calls: Annotated[int, typer.Option(min=1, help="Calls in a block.")] = 100,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    json: Annotated[Path, typer.Option(help="File that gets one JSON line per variant.")] = RESULTS / "overhead.jsonl",
) -> None:
    """Call overhead: forward and backward of a module that does one multiplication, in microseconds."""
    torch.set_num_threads(threads)
    console = console_of()
    facts = machine()
    console.print(describe(facts))
    missing = variants.compiler_missing()
    if missing:
        console.print(f"Without torch.compile and what is built on it: {missing}")
    seconds = interleave({name: call_of(way) for name, way in compilers(missing).items()}, blocks, calls)
    console.print(table_of(f"Overhead, {blocks} blocks of {calls} calls", HEADINGS, rows_of(seconds)))
    figures = figures_of(seconds)
    records = [{"variant": name, "seconds": asdict(quartiles(sample))} for name, sample in seconds.items()]
    write_lines(json, facts, records, figures)
    if not judge(figures, console):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
