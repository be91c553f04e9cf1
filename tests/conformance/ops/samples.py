"""The differentiable operators of torch's own test database, and samples of them chosen the same way each time."""
from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.testing._internal import common_methods_invocations as database
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo
from torch.utils._pytree import tree_leaves, tree_map_only

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SEED = 0
FEW_VALUES = torch.tensor([0.0, 0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 3.0])
UNSTABLE_IF_TIED = ("linalg.", "svd", "pca", "cholesky", "lu", "geqrf", "ormqr", "logdet", "pinverse", "symeig", "eig")

# How close results must be: rtol, atol. A decomposition adds up rounding that a fused kernel does not have.
TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.float64: (1e-7, 1e-7)}


@dataclass(frozen=True)
class Sample:
    """One call of an operator.

    Attributes:
        args: positional arguments; kwargs: the others.
        processed: what is differentiated, made of the outputs (of an eigenvector, say, what does not hang on its sign).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    processed: Callable[[Any], Any]


def _draw_from_the_seed_that_is_set(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


database.wrapper_set_seed = _draw_from_the_seed_that_is_set  # the database seeds inside the call: no program does


def differentiable() -> dict[str, OpInfo]:
    """Return the operators with a gradient in float32 or float64 by full name; each variant is one."""
    return {op.full_name: op for op in database.op_db if any(has_gradient(op, dtype) for dtype in DTYPES.values())}


def has_gradient(op: OpInfo, dtype: torch.dtype) -> bool:
    """Whether an operator is differentiable for a dtype on CPU."""
    return op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")


def samples(op: OpInfo, dtype: torch.dtype, count: int) -> list[Sample]:
    """Return at most `count` samples of an operator, spread over those it has; the same at every call."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)  # the database draws from it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that torch deprecates
        found = list(op.sample_inputs("cpu", dtype, requires_grad=True))
    found = [Sample((s.input, *s.args), dict(s.kwargs), s.output_process_fn_grad) for s in found]
    extra = tied(op, found[-1]) if found and count > 1 and dtype is torch.float32 else None
    count -= extra is not None
    step = max(1.0, (len(found) - 1) / max(1, count - 1))
    chosen = sorted({round(i * step) for i in range(min(count, len(found)))})
    return [*(found[i] for i in chosen), *([extra] if extra else [])]


def tied(op: OpInfo, sample: Sample) -> Sample | None:
    """Return a sample with few values, so that ties, zeros and bounds occur in what is differentiated; None without.

    Rounding decides what a decomposition makes of such a matrix, and eager PyTorch refuses some values.
    """
    if op.full_name.startswith(UNSTABLE_IF_TIED):
        return None
    drawn = torch.Generator().manual_seed(SEED)

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.requires_grad and tensor.dtype is torch.float32 and tensor.layout is torch.strided):
            return tensor
        with torch.no_grad():
            found = _copy(tensor).copy_(FEW_VALUES[torch.randint(len(FEW_VALUES), tensor.shape, generator=drawn)])
        return found.requires_grad_()

    try:
        result = replace(sample, **{name: tree_map_only(torch.Tensor, replaced, getattr(sample, name))
                                    for name in ("args", "kwargs")})
        args, kwargs = copied((result.args, result.kwargs))
        op.op(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError):
        return None
    return result


def tolerances(op: OpInfo, dtype: torch.dtype) -> tuple[float, float]:
    """Return rtol and atol: ours, or where the database has wider ones for the operator, those."""
    rtol, atol = TOLERANCES[dtype]
    for decorator in op.decorators:
        inner = decorator.decorators if isinstance(decorator, DecorateInfo) else [decorator]
        for override in inner:
            if isinstance(override, toleranceOverride) and dtype in override.d:
                rtol, atol = max(rtol, override.d[dtype].rtol), max(atol, override.d[dtype].atol)
    return rtol, atol


def copied(tree: Any) -> Any:
    """Return a copy of an argument tree: leaves with the strides of the originals; one tensor twice stays one."""
    made: dict[int, torch.Tensor] = {}

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _copy(tensor).requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    return tree_map_only(torch.Tensor, copy_of, tree)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not plain or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree in order."""
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor)]
