"""scalar_writes: AOTAutograd loses what a program writes to a float64 argument without dimensions.

Such an argument may stand for a Python number of Dynamo's, and `tensorify_python_scalars` takes it for one: seen in
torch 2.13. Where no number is symbolic that pass has nothing to do, so it is left out there.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import GraphModule

PASS = "tensorify_python_scalars"


@contextmanager
def kept_scalar_writes() -> Iterator[None]:
    """Let AOTAutograd keep those writes within the block."""
    from torch._functorch._aot_autograd import graph_compile

    original = getattr(graph_compile, PASS, None)
    if original is None:
        yield
        return

    def tensorify(module: GraphModule, *args: Any) -> None:
        if any(isinstance(node.meta.get("val"), torch.SymFloat) for node in module.graph.nodes):
            original(module, *args)

    with patch.object(graph_compile, PASS, tensorify):
        yield
