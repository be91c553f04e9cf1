"""The demo: one Llama trained on real text under eager PyTorch, torch.compile, thunder, and jointtrace in both forms.

Its parts that show nothing (the model, what measures) import neither rich nor matplotlib.
"""
from __future__ import annotations

from pathlib import Path


def run(out: Path, steps: int, executor: str | None, layers: int) -> int:
    """Run the demo and return its exit code; see `jointtrace.demo.compare.run`."""
    from jointtrace.demo import compare

    return compare.run(out, steps, executor, layers)


def report(
    model: str, budgets: str | None, front_end: str, executor: str | None, layers: int, out: Path
) -> None:
    """Report on a model's memory; see `jointtrace.demo.tradeoff.run`."""
    from rich.console import Console

    from jointtrace.demo import tradeoff

    console = Console() if Console().is_terminal else Console(width=tradeoff.WIDTH)
    tradeoff.run(tradeoff.Settings(model, front_end, executor, layers), budgets, out, console)
