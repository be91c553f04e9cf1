"""inductor_dry_run: run the code that Inductor generated on tensors without memory, to see what it allocates when.

The Python that Inductor wrote around its kernels allocates and drops every buffer of a region by itself. Here the same
bytecode runs with other globals: kernels do nothing but say that they ran, allocations make tensors in the mode that
is active (a fake tensor mode), and operators that Inductor calls work on those. So the answer is as good for code from
Inductor's cache as for code it just wrote. Scratch that a kernel takes past torch's allocator is not seen.

Private to torch (2.10 to 2.14) are the names in the generated module.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch

Boxed = Callable[[list[Any]], Sequence[Any]]
Sample = Callable[[str, Sequence[Any]], None]

ALLOCATORS = re.compile(r"empty_strided_(cpu|cuda|xpu|mtia)")
KERNELS = re.compile(r"(cpp|triton)_")
WITHOUT_EFFECT = ("assert_size_stride", "assert_alignment", "get_raw_stream")


def dry_run(call: Callable[..., Any], sample: Sample) -> Boxed | None:
    """Return what Inductor generated as a function of tensors without memory; None where it is no Python code.

    Args:
        call: the function `call` of a generated module.
        sample: called where a kernel would run, with its name and its arguments.
    """
    function = call.__func__ if isinstance(call, MethodType) else call
    if not isinstance(function, FunctionType):
        return None
    namespace = dict(function.__globals__)
    for name, value in function.__globals__.items():
        if found := ALLOCATORS.fullmatch(name):
            namespace[name] = _allocator(found[1])
        elif name in WITHOUT_EFFECT:
            namespace[name] = _nothing
        elif name == "reinterpret_tensor":
            namespace[name] = _reinterpret_tensor
        elif KERNELS.match(name) and (callable(value) or hasattr(value, "run")):
            namespace[name] = _Kernel(name, sample)
    dry = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    return MethodType(dry, call.__self__) if isinstance(call, MethodType) else dry


class _Kernel:
    """A kernel that computes nothing; called as C++ ones are, or as Triton's."""

    def __init__(self, name: str, sample: Sample) -> None:
        self.name = name
        self.sample = sample

    def __call__(self, *args: Any) -> None:
        self.sample(self.name, args)

    def run(self, *args: Any, **_: Any) -> None:
        self.sample(self.name, args)


def _allocator(device: str) -> Callable[..., torch.Tensor]:
    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty_strided


def _reinterpret_tensor(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _nothing(*_: Any) -> None:
    return None
