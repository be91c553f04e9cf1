"""compare: say how a value differs from the one it should be, or that it does not."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._comparison import default_tolerances

TINY = 1e-9  # of a result that should be zero


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be off.

    Attributes:
        factor: how many times what torch.testing grants to one operation of the dtype.
        absolute: whether torch.testing's absolute tolerance holds as well; without it the largest element is the scale.
        strides: whether strides must agree.
    """

    factor: float
    absolute: bool
    strides: bool = False


SAME_OPS = Tolerance(10, absolute=False, strides=True)  # the same kernels on the same numbers, in another order at most
OTHER_CODE = Tolerance(10, absolute=True)  # other kernels: a compiled region, another formula of the same function


def difference(found: Any, expected: Any, tolerance: Tolerance) -> str | None:
    """Return how `found` differs from `expected`; None where it does not. NaN equals NaN."""
    if not (isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return _plain_difference(found, expected, tolerance)
    for fact in ("shape", "dtype", "device", "layout"):
        mine, theirs = getattr(found, fact), getattr(expected, fact)
        if mine != theirs:
            return f"{fact} {_text(mine)}, should be {_text(theirs)}"
    values = _values_differ(found.detach(), expected.detach(), tolerance)
    if values is None and tolerance.strides and found.layout is torch.strided and _steps(found) != _steps(expected):
        return f"strides {tuple(found.stride())}, should be {tuple(expected.stride())}"
    return values


def _plain_difference(found: Any, expected: Any, tolerance: Tolerance) -> str | None:
    if found is None or expected is None:
        if found is expected:
            return None
        return f"{'None' if found is None else 'a value'}, should be {'None' if expected is None else 'a value'}"
    if isinstance(found, (int, float, complex)) and isinstance(expected, (int, float, complex)):
        return difference(torch.tensor(found), torch.tensor(expected), tolerance)
    if isinstance(found, torch.Tensor) or isinstance(expected, torch.Tensor):
        return f"{type(found).__name__}, should be {type(expected).__name__}"
    return None  # objects without a value to compare


def _values_differ(found: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> str | None:
    if found.layout is not torch.strided:
        found, expected = found.to_dense(), expected.to_dense()
    if found.is_quantized or not found.numel():
        return None
    if not (found.is_floating_point() or found.is_complex()):
        return _described(found, expected, found != expected)
    rtol, atol = _tolerances(found.dtype, tolerance)
    wide = torch.complex128 if found.is_complex() else torch.float64
    mine, theirs = found.to(wide), expected.to(wide)
    finite = theirs.abs().nan_to_num(0.0, 0.0, 0.0)
    scale = float(finite.max())
    slack = max(atol, max(rtol, atol) * scale) if tolerance.absolute else max(TINY * rtol, rtol * 10 * scale)
    off = ~torch.isclose(mine, theirs, rtol=rtol, atol=slack, equal_nan=True)
    return _described(mine, theirs, off)


def _tolerances(dtype: torch.dtype, tolerance: Tolerance) -> tuple[float, float]:
    try:
        rtol, atol = default_tolerances(dtype)
    except ValueError:  # 8-bit floats
        rtol, atol = 0.125, 0.125
    narrow = rtol > 1e-4  # half precision: torch.testing grants several roundings already
    factor = min(tolerance.factor, 3.0) if narrow else tolerance.factor
    return rtol * factor, atol * factor


def _described(found: torch.Tensor, expected: torch.Tensor, off: torch.Tensor) -> str | None:
    count = int(off.sum())
    if not count:
        return None
    first = tuple(off.nonzero()[0].tolist())
    text = f"{count} of {off.numel()} elements differ, first at {list(first)}: {found[first].item():.6g}, should be " \
           f"{expected[first].item():.6g}"
    if found.dtype is torch.bool:
        return text
    distance = (found - expected).abs().to(torch.float64).nan_to_num(0.0)
    norm = float(expected.abs().to(torch.float64).nan_to_num(0.0, 0.0, 0.0).max())
    largest = float(distance.max())
    return f"{text}; off by up to {largest:.3g}" + (f" where the largest value is {norm:.3g}" if norm else "")


def _steps(tensor: torch.Tensor) -> list[int]:
    pairs = zip(tensor.shape, tensor.stride(), strict=True) if tensor.numel() else ()
    return [step for size, step in pairs if size > 1]


def _text(fact: Any) -> str:
    return str(tuple(fact)) if isinstance(fact, torch.Size) else str(fact)
