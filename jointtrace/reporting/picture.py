"""picture: the memory timeline as PNG, and as one HTML page that needs nothing else and shows what is pointed at."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from jointtrace.reporting.page import PAGE
from jointtrace.reporting.reasons import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jointtrace.reporting.memory import MemoryReport

COLOURS = ("#bbbbbb", "#0072b2", "#56b4e9", "#009e73", "#e69f00")
"""Of `memory.KINDS`, after Okabe and Ito: told apart with every kind of colour blindness."""
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
LABEL_LENGTH = 60


def write_png(report: MemoryReport, path: Path) -> None:
    """Write the timeline as a picture."""
    figure = Figure(figsize=(11, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    columns, edges, (per_unit, unit) = _columns(report), range(len(report.steps) + 1), _unit(report)
    heights = [[nbytes / per_unit for nbytes in (*column, column[-1])] for column in columns]
    axes.stackplot(edges, heights, labels=_kinds(), colors=COLOURS, step="post", linewidth=0)
    top = max(map(sum, zip(*heights, strict=True)))
    axes.set(xlim=(0, len(report.steps)), ylim=(0, 1.22 * top or 1), ylabel=f"memory, {unit}",
             xlabel="operations and kernels in the order they run")
    _mark_phases(axes, report)
    _mark_peak(axes, report, per_unit, top)
    figure.legend(loc="outside lower center", ncols=len(COLOURS), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})


def _mark_phases(axes: Axes, report: MemoryReport) -> None:
    end = len(report.steps)
    if 0 < report.boundary < end:
        axes.axvline(report.boundary, color="black", linewidth=0.8, linestyle="--")
    for name, start, stop in (("forward", 0, report.boundary), ("backward", report.boundary, end)):
        if start < stop:
            axes.text((start + stop) / 2, 1.01, name, transform=axes.get_xaxis_transform(), ha="center", va="bottom")


def _mark_peak(axes: Axes, report: MemoryReport, per_unit: int, top: float) -> None:
    peak = report.peak
    if peak is None:
        return
    position = report.steps.index(peak) + 0.5
    height = sum(peak.nbytes) / per_unit
    label = peak.op if len(peak.op) <= LABEL_LENGTH else f"{peak.op[:LABEL_LENGTH - 1]}…"
    where = f"\n{peak.source}" if peak.source else ""
    side = "left" if position < len(report.steps) / 2 else "right"
    axes.plot([position], [height], marker="v", color="black", markersize=5, clip_on=False)
    axes.annotate(
        f"peak {size(peak.total_bytes)} besides arguments\n{label}{where}", (position, height),
        xytext=(8 if side == "left" else -8, 6), textcoords="offset points", ha=side, va="bottom", fontsize=8,
        linespacing=1.25, bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5},
    )


def write_page(report: MemoryReport, path: Path) -> None:
    """Write the timeline as a page."""
    path.write_text(page_of(report), encoding="utf-8")


def page_of(report: MemoryReport) -> str:
    """Return the timeline as a page."""
    names: dict[str, int] = {}
    steps = []
    for step in report.steps:
        largest = [[names.setdefault(name, len(names)), nbytes] for name, nbytes in step.largest]
        steps.append([step.phase, step.op, str(step.source or ""), step.region, step.nbytes, largest])
    per_unit, unit = _unit(report)
    data: dict[str, Any] = {
        "kinds": _kinds(), "colours": COLOURS, "unit": unit, "perUnit": per_unit, "boundary": report.boundary,
        "peak": report.steps.index(report.peak) if report.peak else 0, "steps": steps, "names": [*names],
        "summary": [*report.summary()], "kept": [str(kept) for kept in report.kept],
    }
    return PAGE.replace("DATA", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _columns(report: MemoryReport) -> list[Sequence[int]]:
    """Return for each kind its bytes at each step."""
    columns: list[Sequence[int]] = [*zip(*(step.nbytes for step in report.steps), strict=True)]
    return columns or [(0,)] * len(COLOURS)


def _kinds() -> tuple[str, ...]:
    from jointtrace.reporting.memory import KINDS

    return KINDS


def _unit(report: MemoryReport) -> tuple[int, str]:
    most = max((sum(step.nbytes) for step in report.steps), default=0)
    return next(((number, unit) for number, unit in UNITS if most >= number), UNITS[-1])
