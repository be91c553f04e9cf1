"""second_derivative: gradients of a compiled backward raise where they are differentiated once more.

To autograd they would be constants, or depend on what was saved alone, and `torch.autograd.functional.hessian` would be
zeros. So a node stands between them and all that they may depend on: the leaves among the arguments, which the node of
the compiled function leads to; arguments with a history, each by an empty tensor that shares its history and not its
memory; cotangents.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from jointtrace.errors import UnsupportedError


def anchors(args: Sequence[Any]) -> Sequence[torch.Tensor]:
    """Return for each argument that is no leaf an empty tensor with the same history."""
    found = [arg for arg in args if type(arg) is torch.Tensor and arg.grad_fn is not None]
    if not found:
        return ()
    with torch.enable_grad():
        return [arg.as_strided((0,), (1,)).clone() for arg in found]


def leaves(node: Any) -> list[torch.Tensor]:
    """Return the leaves among the arguments of a node."""
    return [edge.variable for edge, _ in node.next_functions if hasattr(edge, "variable")]


def without_second_derivative(grads: Sequence[Any], sources: Sequence[torch.Tensor]) -> list[Any]:
    """Return `grads` with a history that raises when it is differentiated for what one of `sources` comes from."""
    present = [g for g in grads if isinstance(g, torch.Tensor)]
    guarded = iter(_SecondDerivative.apply(len(present), *present, *sources) if present else ())
    return [next(guarded) if isinstance(g, torch.Tensor) else g for g in grads]


class _SecondDerivative(Function):
    """Stands behind the gradients of a backward run with create_graph=True."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise UnsupportedError(
            "a second derivative of a function compiled by jointtrace: its backward is compiled code, which autograd "
            "can't differentiate; run the function uncompiled where create_graph=True is needed"
        )
