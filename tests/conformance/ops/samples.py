"""The differentiable operators of torch's own test database, and samples of them chosen the same way each time."""
from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.testing._internal import common_methods_invocations as database
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo
from torch.utils._pytree import tree_leaves, tree_map_only

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SEED = 0

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
    step = max(1.0, (len(found) - 1) / max(1, count - 1))
    chosen = sorted({round(i * step) for i in range(min(count, len(found)))})
    return [Sample((s.input, *s.args), dict(s.kwargs), s.output_process_fn_grad) for s in (found[i] for i in chosen)]


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
