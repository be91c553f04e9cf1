"""What the demo shows and writes: progress, the table, the loss curves, the traces."""
from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import jointtrace
from jointtrace.demo.measure import MIB, Quartiles
from jointtrace.demo.train import Trained
from jointtrace.demo.variants import Loss

LINES_EVERY = 10
FILE_WIDTH = 160
STAGES = ("joint", "forward", "backward")


@dataclass(frozen=True)
class Row:
    """What the table says of one variant."""

    variant: str
    final_loss: float
    worst_difference: float
    step_ms: float
    ratio: Quartiles
    kept_bytes: int
    first_call_s: float
    regions: str


LINES: dict[str, Callable[[Row], str]] = {
    "final loss": lambda row: f"{row.final_loss:.4f}",
    "largest difference": lambda row: f"{row.worst_difference:.1e}",
    "step, ms": lambda row: f"{row.step_ms:.1f}",
    "step / eager": lambda row: f"{row.ratio.median:.2f}",
    "  quartiles": lambda row: f"{row.ratio.low:.2f}-{row.ratio.high:.2f}",
    "kept, MiB": lambda row: f"{row.kept_bytes / MIB:.1f}",
    "first call, s": lambda row: f"{row.first_call_s:.1f}",
    "regions": lambda row: row.regions,
}
"""Headings of the table and what stands in a variant's column."""


@contextmanager
def progress_of(console: Console, total: int) -> Iterator[Callable[[str, float], None]]:
    """Give a function to call with (variant, loss) after each step: moves a bar, or prints lines off a terminal."""
    if not console.is_terminal:
        yield line_printer(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("compiling", total=total)

        def advance(variant: str, loss: float) -> None:
            bar.update(task, advance=1, description=f"{variant}: loss {loss:.4f}")

        yield advance


def line_printer(console: Console) -> Callable[[str, float], None]:
    """Return a function that prints the first and every tenth step of each variant."""
    taken: dict[str, int] = {}

    def advance(variant: str, loss: float) -> None:
        taken[variant] = taken.get(variant, 0) + 1
        if taken[variant] == 1 or taken[variant] % LINES_EVERY == 0:
            console.print(f"{variant}: step {taken[variant]}, loss {loss:.4f}")

    return advance


def table_of(title: str, rows: Sequence[Row], absent: Mapping[str, str]) -> Table:
    """Return the table, one column a variant; below it stands why a variant did not run."""
    caption = "\n".join(f"{variant}: {reason}" for variant, reason in absent.items())
    table = Table(title=title, caption=caption or None, caption_justify="left", padding=0)  # five columns in 80 signs
    table.add_column("")
    for variant in (*(row.variant for row in rows), *absent):
        table.add_column(variant, justify="right", min_width=max(map(len, variant.split())))
    for heading, cell in LINES.items():
        table.add_row(heading, *(cell(row) for row in rows), *("-" for _ in absent))
    return table


def write_table(out: Path, table: Table, rows: Sequence[Row], absent: Mapping[str, str], executor: str) -> None:
    """Write the table as text and as JSON."""
    with (out / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=FILE_WIDTH).print(table)
    record = {"variants": [asdict(row) for row in rows], "absent": dict(absent), "executor": executor}
    (out / "table.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_losses(out: Path, trained: Sequence[Trained]) -> None:
    """Write the loss curves as CSV, one column a variant, and as a picture."""
    with (out / "losses.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(one.name for one in trained)])
        for step, losses in enumerate(zip(*(one.losses for one in trained), strict=True), start=1):
            writer.writerow([step, *losses])
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for thickness, one in zip(range(2 * len(trained), 0, -2), trained, strict=True):
        axes.plot(range(1, len(one.losses) + 1), one.losses, label=one.name, linewidth=thickness)
    axes.set(xlabel="step", ylabel="cross entropy, nats per byte")
    axes.legend()
    figure.savefig(out / "losses.png")


def write_traces(out: Path, model: Loss) -> None:
    """Write the joint trace, both halves, and the report of a model that jointtrace compiled, to a new folder."""
    out.mkdir(exist_ok=True)
    for stage in STAGES:
        (out / f"{stage}.txt").write_text(jointtrace.dump(model, stage=stage), encoding="utf-8")
    (out / "report.txt").write_text(f"{jointtrace.report(model)}\n", encoding="utf-8")
