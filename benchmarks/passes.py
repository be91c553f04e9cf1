"""Time of our passes, from the joint build to the split, per layer of the reference Llama at several depths.

    python benchmarks/passes.py

For both front ends; through torch.compile there is no joint build, AOTAutograd's takes its place and is not in it.
Tracing, code generation and the verification after each pass are not in it either.
Exit code 1: a depth costs too much per layer, or the cost is not linear.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from harness import RESULTS, Figure, console_of, describe, judge, machine, table_of, write_lines

import jointtrace
from jointtrace.demo import variants
from jointtrace.demo.measure import Step
from jointtrace.demo.model import Llama, LlamaConfig

FRONTENDS = {"thunder": variants.by_thunder, "dynamo": variants.by_torch_compile}
LAYER_LIMIT_MS = {"thunder": 150.0, "dynamo": 60.0}
GROWTH_LIMIT = 1.25
"""Per-layer time of the deepest over that of a quarter of its depth: 1 is linear, 4 quadratic; the rest is noise."""


@dataclass(frozen=True)
class Depth:
    """What the passes took on a model of `layers` layers, through one front end."""

    frontend: str
    layers: int
    pass_s: Mapping[str, float]
    ops: int

    @property
    def layer_ms(self) -> float:
        return 1e3 * sum(self.pass_s.values()) / self.layers


def depth_of(frontend: str, layers: int, width: int, executor: str) -> Depth:
    """Compile a Llama of `layers` layers, run one step, and return what its passes took."""
    torch.manual_seed(0)
    config = LlamaConfig(layers=layers, width=width, hidden=width * 43 // 16)
    module = Llama(config)
    model = FRONTENDS[frontend](executor)(module)
    sample_BT = torch.randint(config.vocabulary, (1, config.context))
    Step(model, tuple(module.parameters()), (sample_BT, sample_BT))()
    pass_s: dict[str, float] = defaultdict(float)
    records = jointtrace.report(model).passes
    for record in records:
        pass_s[record.name] += record.seconds
    return Depth(frontend, layers, dict(pass_s), records[0].ops)


def growth(depths: Sequence[Depth]) -> float | None:
    """Return the deepest model's time per layer over that of the one a quarter as deep; None where that is missing."""
    by_layers = {depth.layers: depth for depth in depths}
    deepest = max(by_layers)
    quarter = by_layers.get(deepest // 4)
    return None if quarter is None else by_layers[deepest].layer_ms / quarter.layer_ms


def figures_of(depths: Sequence[Depth]) -> list[Figure]:
    """Return one figure per depth of one front end, and the growth where it is known."""
    frontend = depths[0].frontend
    figures = [
        Figure(f"{frontend}: passes per layer, {depth.layers} layers", depth.layer_ms, LAYER_LIMIT_MS[frontend], "ms")
        for depth in depths
    ]
    growing = growth(depths)
    if growing is not None:
        deepest = max(depth.layers for depth in depths)
        figures.append(Figure(f"{frontend}: per layer, {deepest} layers over {deepest // 4}", growing, GROWTH_LIMIT))
    return figures


def rows_of(depths: Sequence[Depth]) -> list[list[str]]:
    """Return one row per pass with its time per layer at each depth, then the sum and the number of ops."""
    names = dict.fromkeys(name for depth in depths for name in depth.pass_s)
    rows = [[name, *(f"{1e3 * depth.pass_s.get(name, 0.0) / depth.layers:.2f}" for depth in depths)] for name in names]
    rows.append(["all passes", *(f"{depth.layer_ms:.2f}" for depth in depths)])
    rows.append(["ops of the joint trace", *(str(depth.ops) for depth in depths)])
    return rows


def main(
    depths: Annotated[str, typer.Option(help="Numbers of layers with commas between.")] = "2,4,8,16",
    frontends: Annotated[str, typer.Option(help="thunder, dynamo, or both with a comma between.")] = "thunder,dynamo",
    width: Annotated[int, typer.Option(min=16, help="Width of the model, a multiple of 16.")] = 256,
    executor: Annotated[
        Literal["torch_compile", "eager"], typer.Option(help="eager is quick: it compiles nothing.")
    ] = "torch_compile",
    json: Annotated[Path, typer.Option(help="File that gets one JSON line per depth.")] = RESULTS / "passes.jsonl",
) -> None:
    """Time of our passes, from the joint build to the split, per layer of the reference Llama at several depths."""
    console = console_of()
    facts = machine()
    console.print(describe(facts))
    figures, records = [], []
    for frontend in frontends.split(","):
        if frontend not in FRONTENDS:
            raise typer.BadParameter(f"frontends={frontend!r}; accepted: {', '.join(FRONTENDS)}")
        measured = []
        for layers in map(int, depths.split(",")):
            measured.append(depth_of(frontend, layers, width, executor))
            console.print(f"{frontend}, {layers} layers: {measured[-1].layer_ms:.1f} ms per layer")
        headings = ("pass", *(f"{depth.layers} layers" for depth in measured))
        console.print(table_of(f"{frontend}: milliseconds per layer", headings, rows_of(measured)))
        figures += figures_of(measured)
        records += [{**asdict(depth), "width": width} for depth in measured]
    write_lines(json, facts, records, figures)
    if not judge(figures, console):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
