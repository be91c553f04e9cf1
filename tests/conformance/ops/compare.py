"""Run one sample by a compiled function and by eager PyTorch, and say where they differ."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from conformance.ops.samples import SEED, Sample, copied, tensors
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_structure

STEP = 1e-6  # of a central difference in float64
DIFFERENCE_RTOL = 1e-4  # how close it must be to the gradient: its error is of the order of STEP squared and eps / STEP

Fn = Callable[..., Any]


class DiffersError(AssertionError):
    """The compiled function computed something else than eager PyTorch."""


@dataclass(frozen=True)
class Outcome:
    """What one call gave.

    Attributes:
        outputs: the tree of outputs.
        gradients: of the arguments that require one, in order; None where there is none.
        arguments: the arguments' tensors after the call.
    """

    outputs: Any
    gradients: list[torch.Tensor | None]
    arguments: list[torch.Tensor]


def run(fn: Fn, sample: Sample, seed: int = SEED) -> Outcome:
    """Call `fn` on a copy of a sample and differentiate what it returns with fixed random cotangents."""
    args, kwargs = copied((sample.args, sample.kwargs))
    inputs = [t for t in tensors((args, kwargs)) if t.requires_grad]
    torch.manual_seed(seed)
    outputs = fn(*args, **kwargs)
    losses = [t for t in tensors(sample.processed(outputs)) if t.requires_grad]
    gradients: list[torch.Tensor | None] = [None] * len(inputs)
    if losses and inputs:
        gradients = [*torch.autograd.grad(losses, inputs, cotangents(losses), allow_unused=True)]
    return Outcome(outputs, gradients, [t.detach() for t in tensors((args, kwargs))])


def cotangents(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a random cotangent for each output, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(out.shape, dtype=_drawn_in(out.dtype), generator=generator).to(out.dtype) for out in outputs]


def _drawn_in(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def is_random(fn: Fn, sample: Sample) -> bool:
    """Whether eager PyTorch gives other outputs under another seed."""
    first, second = (tensors(run(fn, sample, seed).outputs) for seed in (SEED, SEED + 1))
    return any(not _equal(dense(a), dense(b)) for a, b in zip(first, second, strict=True))


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in the strided layout."""
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided and not tensor.is_nested else tensor.to_dense()


def assert_same(found: Outcome, expected: Outcome, rtol: float, atol: float, *, values: bool = True) -> None:
    """Assert that two outcomes agree; without `values`, in all but the numbers.

    Raises:
        DiffersError: names the output, argument or gradient, and how it differs.
    """
    if structure(found.outputs) != structure(expected.outputs):
        raise DiffersError(f"outputs: {structure(found.outputs)}, eager {structure(expected.outputs)}")
    rows = [("output", *pair) for pair in zip(tree_leaves(found.outputs), tree_leaves(expected.outputs), strict=True)]
    rows += [("argument", *pair) for pair in zip(found.arguments, expected.arguments, strict=True)]
    rows += [("gradient", *pair) for pair in zip(found.gradients, expected.gradients, strict=True)]
    for position, (kind, mine, eager) in enumerate(rows):
        _assert_same_leaf(f"{kind} (row {position})", mine, eager, rtol, atol, values)


def structure(outputs: Any) -> TreeSpec:
    """Return the containers of an output tree; tuples, with names or without, and lists count as one kind."""
    return tree_structure(tree_map(lambda _: 0, _plain(outputs)))


def _plain(tree: Any) -> Any:
    return tuple(_plain(item) for item in tree) if isinstance(tree, (list, tuple)) else tree


def _assert_same_leaf(name: str, mine: Any, eager: Any, rtol: float, atol: float, values: bool) -> None:
    facts, wanted = facts_of(mine), facts_of(eager)
    if facts != wanted:
        raise DiffersError(f"{name}: {facts}, eager {wanted}")
    if not values or not isinstance(eager, torch.Tensor):
        return
    try:
        torch.testing.assert_close(dense(mine), dense(eager), rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    except AssertionError as error:
        raise DiffersError(f"{name}: {' '.join(str(error).split())}") from None


def facts_of(leaf: Any) -> Any:
    """Return what must be equal, but for numbers within the tolerance."""
    if isinstance(leaf, torch.Tensor):
        return (str(leaf.dtype), tuple(leaf.shape), str(leaf.layout), "requires_grad" if leaf.requires_grad else "")
    return leaf


def assert_own_gradient(compiled: Fn, sample: Sample, found: Outcome) -> None:
    """Assert that the gradient is the derivative of what the compiled function itself computes under one seed.

    For random operators: the draw differs from eager's. Compared is the derivative along one random direction.
    """
    inputs = [t for t in tensors((sample.args, sample.kwargs)) if t.requires_grad]
    generator = torch.Generator().manual_seed(2)
    directions = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in inputs]
    pairs = zip(found.gradients, directions, strict=True)
    expected = sum(float((g * d).sum()) for g, d in pairs if g is not None)
    ahead, behind = (_value(compiled, sample, directions, step) for step in (STEP, -STEP))
    measured = (ahead - behind) / (2 * STEP)
    if abs(measured - expected) > DIFFERENCE_RTOL * max(1.0, abs(expected), abs(ahead)):
        raise DiffersError(f"gradient along a direction: {expected}, by differences {measured}")


def assert_gradient_of_a_draw(compiled: Fn, eager: Fn, sample: Sample, found: Outcome, expected: Outcome) -> None:
    """Assert that a random operator's gradient belongs to its own draw, or is eager's where eager's does not.

    torch.normal has a gradient of zeros by definition.
    """
    try:
        assert_own_gradient(eager, sample, expected)
    except DiffersError:
        for mine, theirs in zip(found.gradients, expected.gradients, strict=True):
            _assert_same_leaf("gradient", mine, theirs, 0.0, 0.0, True)
    else:
        assert_own_gradient(compiled, sample, found)


def _value(fn: Fn, sample: Sample, directions: list[torch.Tensor], step: float) -> float:
    """Return the sum of all outputs times their cotangents, the arguments shifted along `directions`."""
    args, kwargs = copied((sample.args, sample.kwargs))
    with torch.no_grad():
        for tensor, direction in zip((t for t in tensors((args, kwargs)) if t.requires_grad), directions, strict=True):
            tensor.add_(direction, alpha=step)
    torch.manual_seed(SEED)
    outputs = [t for t in tensors(sample.processed(fn(*args, **kwargs))) if t.requires_grad]
    return sum(float((out.detach() * c).sum()) for out, c in zip(outputs, cotangents(outputs), strict=True))
