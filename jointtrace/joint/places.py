"""Arguments that are one tensor: noted while thunder traces, trusted when the program runs only if it is so again.

Two arguments stand for one tensor where they are the same object, or lie at the same place in memory with no gradient
to tell them apart. thunder's cache compiles anew when other arguments share memory.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from thunder.core.proxies import TensorProxy

PLACE = "_jointtrace_place"


def note_place(proxy: TensorProxy, tensor: torch.Tensor) -> TensorProxy:
    """Note which tensor `proxy` was made for, where a renamed proxy has it too; return `proxy`."""
    if proxy.history is not None:
        setattr(proxy.history, PLACE, place_of(tensor))
    return proxy


def place_of(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for arguments that are one tensor."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
    if tensor.requires_grad or not plain:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def repeated(inputs: Sequence[Any]) -> dict[str, str]:
    """Return for each input that is one tensor with an earlier one the name of that one."""
    first: dict[Hashable, str] = {}
    found: dict[str, str] = {}
    for proxy in inputs:
        place = getattr(proxy.history, PLACE, None)
        if place is not None and first.setdefault(place, proxy.name) != proxy.name:
            found[proxy.name] = first[place]
    return found
