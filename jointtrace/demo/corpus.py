"""Real text that every machine with Python has: the sources of its standard library, as bytes."""
from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from jointtrace.errors import UnsupportedError

VOCABULARY = 256
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


def standard_library(root: Path | None = None) -> Tensor:
    """Return the Python sources under `root` (default: the standard library) as one uint8 tensor, in path order.

    Raises:
        UnsupportedError: `root` holds no Python source (a zipped or stripped Python).
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    paths = sorted((path for path in paths if LEFT_OUT.isdisjoint(path.parts)), key=Path.as_posix)
    text = bytearray().join((root / path).read_bytes() for path in paths)
    if not text:
        raise UnsupportedError(f"no Python sources under {root}; use a Python whose standard library is in .py files")
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(text: Tensor, batch: int, context: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `steps` pairs (tokens, next tokens), int64 of shape (batch, context), at random places that `seed` fixes.

    Raises:
        UnsupportedError: `text` is shorter than one sample.
    """
    starts = len(text) - context
    if starts < 1:
        raise UnsupportedError(f"a text of {len(text)} bytes is too short for samples of {context + 1}")
    generator = torch.Generator().manual_seed(seed)
    offsets_T = torch.arange(context + 1)
    for _ in range(steps):
        start_B = torch.randint(starts, (batch, 1), generator=generator)
        sample_BT = text[start_B + offsets_T].long()
        yield sample_BT[:, :-1], sample_BT[:, 1:]
