"""How much arithmetic a compute-bound op does: torch's own formulas, or the size of the contraction.

Holds for torch 2.10 to 2.14: `flop_registry`, whose formulas take shapes where they take tensors.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from jointtrace.ir.facts import hint, numel
from jointtrace.ir.op import Op, TensorType, Type, Var, map_leaves


def flops(op: Op, types: Mapping[str, Type]) -> int:
    """Return the floating-point operations of `op`, sizes that are not known counted by their hints.

    Without a formula of torch's it is taken for one contraction of its two largest operands.
    """
    formula = _formula(op.target.fn)
    if formula is None:
        return _contraction(op, types)
    args, kwargs, out = map_leaves(_shapes(types), (op.args, dict(op.kwargs), op.out))
    try:
        return int(formula(*args, **kwargs, out_val=out))
    except (TypeError, ValueError, AssertionError, IndexError, NotImplementedError):  # of shapes it does not expect
        return _contraction(op, types)


@cache
def _formula(target: Any) -> Callable[..., int] | None:
    """Return the formula of an operator, or that of the one whose name it extends (`..._attention_for_cpu`)."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = str(target.overloadpacket)
    backward = name.endswith("_backward")
    found = [packet for packet in flop_registry
             if _stem(name).startswith(_stem(str(packet))) and str(packet).endswith("_backward") == backward]
    return flop_registry[max(found, key=lambda packet: len(str(packet)))] if found else None


def _stem(name: str) -> str:
    return name.removesuffix("_backward")


def _shapes(types: Mapping[str, Type]) -> Callable[[Any], Any]:
    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, Var):
            return leaf
        kind = types.get(leaf.name)
        return torch.Size(map(hint, kind.shape)) if isinstance(kind, TensorType) else leaf

    return shape


def _contraction(op: Op, types: Mapping[str, Type]) -> int:
    """Return twice the elements made times the length of the contraction: for (M, K) and (K, N) that is 2 M N K."""
    made = max((numel(types.get(name)) for name in op.outs), default=0)
    operands = sorted((numel(types.get(name)) for name in dict.fromkeys(op.ins)), reverse=True)[:2]
    if not made or not operands:
        return 0
    return 2 * made * max(1, round(math.sqrt(math.prod(operands) / made / _batch(op, types))))


def _batch(op: Op, types: Mapping[str, Type]) -> int:
    """Return how many contractions stand side by side: the leading sizes that all large operands share."""
    shapes = [tuple(map(hint, kind.shape)) for name in dict.fromkeys(op.ins)
              if isinstance(kind := types.get(name), TensorType) and len(kind.shape) > 2]
    if len(shapes) < 2:
        return 1
    batch = 1
    for sizes in zip(*(shape[:-2] for shape in shapes), strict=False):
        if len(set(sizes)) > 1:
            break
        batch *= sizes[0]
    return max(1, batch)
