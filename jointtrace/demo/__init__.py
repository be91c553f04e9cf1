"""The demo: one Llama trained on real text under eager PyTorch, torch.compile, thunder, and jointtrace in both forms.

Its parts that show nothing (the model, what measures) import neither rich nor matplotlib.
"""
from __future__ import annotations

from pathlib import Path


def run(out: Path, steps: int, executor: str | None, layers: int) -> int:
    """Run the demo and return its exit code; see `jointtrace.demo.compare.run`."""
    from jointtrace.demo import compare

    return compare.run(out, steps, executor, layers)
