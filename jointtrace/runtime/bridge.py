"""bridge: make the results of a compiled forward part of torch's autograd graph, with a compiled backward behind them.

Kept as in eager: which outputs require grad; a gradient is None where none of the cotangents it depends on exists; a
second `backward()` raises unless the graph is retained; saved tensors go through `save_for_backward` alone, so that
saved-tensor hooks, outer checkpoints and the check for later writes work. Saved tensors and cotangents are freed as the
backward uses them up. There is no second derivative, and asking for one raises.

The cotangents get the strides their outputs had, as compiled backwards are made for one layout.

`boxed_grads_call` is an attribute of `torch.autograd.Function` from torch 2.13 on (before, cotangents live until the
backward returns); `maybe_clear_saved_tensors` is undocumented and holds for torch 2.7 to 2.14.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from jointtrace.runtime.second_derivative import anchors, leaves, without_second_derivative

BackwardFn = Callable[[list[Any], list[Any]], Sequence[Any]]
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]

BOXED = hasattr(Function, "boxed_grads_call")


def connect(
    backward_fn: BackwardFn,
    flat_args: Sequence[Any],
    flat_output: Sequence[Any],
    saved_tensors: Sequence[Any],
    saved_other: Sequence[Any],
    differentiable: tuple[bool, ...],
    depends: tuple[frozenset[int], ...],
    *,
    written: frozenset[int] = frozenset(),
    drop_grads: bool = False,
) -> None:
    """Give the tensors of `flat_output` their `grad_fn`, in place.

    Args:
        backward_fn: `backward_fn([saved_tensors, saved_other], cotangents)`, with lists of its own that it empties;
            returns one gradient or None per argument.
        flat_args: the forward's arguments, tensors or not.
        flat_output: its results, tensors or not; one that is an argument stays as it is, and so does its history,
            unless it is `written`.
        saved_tensors, saved_other: what the forward hands to the backward.
        differentiable: for each output whether it requires grad.
        depends: for each argument the positions of the outputs whose cotangents its gradient depends on.
        written: positions of the results that are arguments with a new history, as the forward wrote to them.
        drop_grads: run the backward for its effects alone, and return None for every gradient.
    """
    layouts = [_layout(out) if d else None for out, d in zip(flat_output, differentiable, strict=True)]
    call = _Call(backward_fn, saved_other, depends, layouts, written, drop_grads, anchors(flat_args))
    with torch.enable_grad():
        ThunderFunction.apply(call, saved_tensors, flat_output, *flat_args)


@dataclass(slots=True)
class _Call:
    """What the node keeps besides tensors."""

    backward_fn: BackwardFn
    saved_other: Sequence[Any]
    depends: tuple[frozenset[int], ...]
    layouts: list[Layout | None]
    written: frozenset[int]
    drop_grads: bool
    anchors: Sequence[torch.Tensor]


class ThunderFunction(Function):
    """The one node that a compiled function is in torch's autograd graph; thunder's name, as programs look for it."""

    boxed_grads_call = True

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: _Call, saved_tensors: Sequence[Any], flat_output: Sequence[Any], *flat_args: Any
    ) -> tuple[Any, ...]:
        """Save what the backward needs, and return the results as they are."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.saves = bool(saved_tensors)
        ctx.save_for_backward(*map(_without_base, saved_tensors))
        pairs = zip(flat_output, call.layouts, strict=True)
        constant = [out for out, layout in pairs if layout is None and isinstance(out, torch.Tensor)]
        if constant:
            ctx.mark_non_differentiable(*constant)
        if call.written:
            ctx.mark_dirty(*(flat_output[i] for i in call.written))
        return tuple(flat_output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Run the compiled backward on the cotangents, one list of them where torch boxes them."""
        boxed: list[Any] = cotangents[0] if BOXED else list(cotangents)
        if not torch.is_grad_enabled():
            return (None, None, None, *_run(ctx, boxed))
        sources = [*leaves(ctx), *ctx.call.anchors, *(c for c in boxed if c is not None and c.requires_grad)]
        with torch.no_grad():
            grads = [None if g is None else g.detach() for g in _run(ctx, boxed)]
        return (None, None, None, *without_second_derivative(grads, sources))


def _run(ctx: Any, cotangents: list[Any]) -> Sequence[Any]:
    call: _Call = ctx.call
    missing = {i for i, cotangent in enumerate(cotangents) if cotangent is None}
    absent = [bool(positions) and positions <= missing for positions in call.depends] if missing else []
    if absent and all(a or not positions for a, positions in zip(absent, call.depends, strict=True)):
        return [None] * len(call.depends)
    _fill_in(cotangents, call)
    saved = list(ctx.saved_tensors) if ctx.saves else []
    ctx.maybe_clear_saved_tensors()  # but for a retained graph
    grads = call.backward_fn([saved, list(call.saved_other)], cotangents)
    if call.drop_grads:
        return [None] * len(grads)
    return [None if a else g for a, g in zip(absent, grads, strict=True)] if absent else grads


def _fill_in(cotangents: list[Any], call: _Call) -> None:
    """Bring the cotangents into the layouts of their outputs; one that is missing, and read, is zero."""
    for i, layout in enumerate(call.layouts):
        if layout is None:
            continue
        cotangent = cotangents[i]
        if cotangent is None:
            if any(i in positions for positions in call.depends):
                shape, strides, dtype, device = layout
                cotangents[i] = torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
        elif cotangent.stride() != layout[1] and type(cotangent) is torch.Tensor:
            cotangents[i] = _with_strides(cotangent, layout[1])


def _with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return `tensor` with `strides`: a copy, but where they differ only in dimensions that have no step."""
    stepping = [(a, b) for size, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True) if size > 1]
    if not tensor.numel() or all(a == b for a, b in stepping):
        return tensor.as_strided(tensor.shape, strides)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _layout(out: Any) -> Layout | None:
    """Return shape, strides, dtype and device of a cotangent of `out`; None where it is no tensor."""
    if not isinstance(out, torch.Tensor):
        return None
    strides = out.stride() if out.is_contiguous() else _dense_strides(tuple(out.shape), out.stride())
    return out.shape, strides, out.dtype, out.device


@functools.lru_cache(maxsize=1024)
def _dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return `strides` where they leave no gap and overlap nowhere, else those of a contiguous tensor."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(shape, device="meta").stride()
        expected *= size
    return strides


def _without_base(tensor: Any) -> Any:
    """Return a tensor to save: a view of an output would keep the node, and with it itself, alive (pytorch 94990)."""
    return tensor.detach() if tensor is not None and tensor._base is not None else tensor
