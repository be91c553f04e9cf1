"""named_tensors: torch >= 2.13 has no named-tensor methods; thunder 0.2.6 lists them while it is imported.

They stand on torch only for that time, and are then taken off thunder's list of torch functions. A call of one can only
come from a program that names them itself.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

TORCH = ">=2.13"
_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename", "rename_")
_FUNCTIONS = ("align_tensors",)


@contextlib.contextmanager
def stubs() -> Iterator[None]:
    """Give torch the names for the time of the block."""
    import torch

    made = set()
    with contextlib.ExitStack() as undo:
        for owner, names in ((torch.Tensor, _METHODS), (torch, _FUNCTIONS)):
            for name in names:
                if not hasattr(owner, name):
                    stub = _stub(name)
                    made.add(stub)
                    setattr(owner, name, stub)
                    undo.callback(delattr, owner, name)
        yield
    listing = sys.modules.get("thunder.torch.default_torch_ops")
    for functions in listing.torch_auto_registered_ops.values() if listing else ():
        functions[:] = [function for function in functions if function not in made]


def _stub(name: str) -> Callable[..., Any]:
    def removed(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torch removed {name} together with named tensors")

    removed.__name__ = removed.__qualname__ = name
    return removed
