"""Gradients by torch's own autograd, where thunder has no rule for a function or a wrong one.

The backward is one op, `<name>_vjp`: it runs the function once more on what the forward was given and differentiates
it. What torch does not differentiate, or returns without a gradient, is found by running it on fake tensors first; so
outputs and gradients are those of eager PyTorch, missing ones included.
"""
from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.prims import get_grad, put_grad
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import get_tracectx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from jointtrace.errors import UnsupportedError
from jointtrace.joint.rules import OPERATORS

Fn = Callable[..., Any]
Rule = Callable[..., Any]
OURS = "jointtrace:"  # thunder's executors run what they know by its id
DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

PRIMS: dict[Any, Fn] = {  # thunder has no rule for them, or a wrong one at 0
    prims.PrimIDs.ATAN2: torch.atan2,
    prims.PrimIDs.FLIP: torch.flip,
    prims.PrimIDs.MINIMUM: torch.minimum,
    prims.PrimIDs.NEXTAFTER: torch.nextafter,
    prims.PrimIDs.POW: torch.pow,
    prims.PrimIDs.REMAINDER: torch.remainder,
    prims.PrimIDs.UNFOLD: torch.Tensor.unfold,
}


def _prod(a: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return torch.prod(a, dtype=dtype) if dim is None else torch.prod(a, dim, keepdim, dtype=dtype)


SYMBOLS: dict[Any, Fn] = {  # whose rules are wrong: at a bound, of the sign, of values that broadcast, with zeros
    ltorch.clamp.id: torch.clamp,
    ltorch.copysign.id: torch.copysign,
    ltorch.index_put.id: torch.index_put,
    ltorch.prod.id: _prod,
}


class _Watch(TorchDispatchMode):
    """Raise where a function does what its second run in the backward would not repeat exactly."""

    def __init__(self, name: str, given: Sequence[Any]) -> None:
        super().__init__()
        self.name = name
        self.given = {t.untyped_storage()._cdata for t in given if isinstance(t, FakeTensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedError(f"{self.name}{here()} draws random numbers, and thunder has no rule that keeps them "
                                   "for the backward; multiply by a mask made with torch.rand, or use dropout")
        if func is torch.ops.aten.native_batch_norm.default and args[5] and args[3] is not None:
            raise UnsupportedError(f"{self.name}{here()} writes to running statistics, for which thunder has no rule; "
                                   "use torch.nn.functional.batch_norm")  # the operator's schema does not say so
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, FakeTensor) and value.untyped_storage()._cdata in self.given:
                raise UnsupportedError(f"{self.name}{here()} writes to its argument, and thunder has no rule for it; "
                                       "write with copy_ what it returns")
        return func(*args, **(kwargs or {}))


def here() -> str:
    trace = get_tracectx()
    file, position = (getattr(trace, f"_current_source_{part}", None) for part in ("filename", "positions"))
    return f" ({file}:{position.lineno})" if file and position else ""


def _fake_of(leaf: Any) -> Any:
    if isinstance(leaf, TensorProxy):
        fake: Any = ltorch._get_fake_arg(leaf)
        return fake.requires_grad_(leaf.requires_grad and (fake.is_floating_point() or fake.is_complex()))
    try:
        return ltorch._get_fake_arg(leaf)
    except NotImplementedError:
        return leaf


@contextlib.contextmanager
def faked(name: str, args: Any, kwargs: Any) -> Any:
    """Yield the arguments as fake tensors, in the mode to run them in.

    Raises:
        UnsupportedError: what runs inside has sizes that depend on values.
    """
    with FakeTensorMode() as mode, torch.enable_grad(), torch._C._DisableAutocast():  # thunder inserts casts itself
        leaves, spec = tree_flatten((args, kwargs))
        fakes = [_fake_of(mode.from_tensor(leaf) if type(leaf) is torch.Tensor else leaf) for leaf in leaves]
        try:
            with _Watch(name, fakes):
                yield fakes, *tree_unflatten(fakes, spec)
        except DEPENDS_ON_VALUES:
            raise UnsupportedError(f"what {name}{here()} returns has sizes that depend on values; leave it out of the "
                                   "compiled function") from None


def flat_outputs(outputs: Any) -> list[Any]:
    return list(tree_flatten(outputs)[0]) if isinstance(outputs, (tuple, list, dict)) else [outputs]


def _probe(name: str, fn: Fn, args: Any, kwargs: Any) -> tuple[list[int], list[int]]:
    """Return the positions of flat arguments that get a gradient, and of the flat outputs that have one."""
    with faked(name, args, kwargs) as (leaves, fake_args, fake_kwargs):
        outputs = flat_outputs(fn(*fake_args, **fake_kwargs))
        if any(isinstance(out, FakeTensor) and out.layout is not torch.strided for out in outputs):
            raise UnsupportedError(f"{name} returns a sparse tensor; leave it out of the compiled function")
        outs = [i for i, out in enumerate(outputs) if isinstance(out, FakeTensor) and out.requires_grad]
        ins = [i for i, leaf in enumerate(leaves) if isinstance(leaf, FakeTensor) and leaf.requires_grad]
        if not outs or not ins:
            return [], []
        chosen = [outputs[i] for i in outs]
        grads = torch.autograd.grad(chosen, [leaves[i] for i in ins], [torch.empty_like(o) for o in chosen],
                                    allow_unused=True)
    reached = [i for i, grad in zip(ins, grads, strict=True) if grad is not None]
    if not reached:
        raise UnsupportedError(f"{name} returns what requires a gradient but gives none; detach it")
    return reached, outs


def _vjp(fn: Fn, args: Any, kwargs: Any, ins: Any, outs: Any, *cotangents: Any) -> Any:
    """Run `fn` again and return the gradients of its flat arguments `ins`, given those of its flat outputs `outs`."""
    leaves, spec = tree_flatten((args, kwargs))
    with torch.enable_grad(), torch._C._DisableAutocast():
        for i in ins:
            leaves[i] = leaves[i].detach().requires_grad_()
        args, kwargs = tree_unflatten(leaves, spec)
        outputs = flat_outputs(fn(*args, **kwargs))
        return torch.autograd.grad([outputs[i] for i in outs], [leaves[i] for i in ins], cotangents)


def _vjp_meta(args: Any, kwargs: Any, ins: Any, outs: Any, *cotangents: Any) -> Any:
    leaves = tree_flatten((args, kwargs))[0]
    return tuple(TensorProxy(like=leaves[i], requires_grad=False) for i in ins)


def printed(name: str) -> str:
    """Return the name of a torch function as one Python name that no other operator of ours has."""
    name = wish = re.sub(r"\W", "_", name)
    count = 1
    while name in OPERATORS.opmap:
        count += 1
        name = f"{wish}_{count}"
    return name


@functools.cache
def rule_for(name: str, fn: Fn, symbol: Symbol) -> Rule:
    """Return the gradient rule of `symbol`, which computes `fn`."""
    run = functools.partial(_vjp, fn)
    run.runs_autograd = True  # type: ignore[attr-defined]  so that no executor traces it
    vjp = OPERATORS.register_operator(printed(f"{name}_vjp"), meta=_vjp_meta, fn=run)

    def rule(*args: Any, **kwargs: Any) -> Any:
        result = symbol(*args, **kwargs)
        ins, outs = _probe(name, fn, args, kwargs)
        if ins:
            results = tree_flatten(result)[0]
            cotangents = [get_grad(results[i]) for i in outs]
            grads = vjp(args, kwargs, tuple(ins), tuple(outs), *cotangents)
            leaves = tree_flatten((args, kwargs))[0]
            for i, grad in zip(ins, grads, strict=True):
                put_grad(leaves[i], grad)
        return result

    return rule


def rule_by_autograd(bsym: BoundSymbol) -> Rule | None:
    """Return a rule for a symbol that thunder registered without one of its own, or whose rule it lacks."""
    symbol = bsym.sym
    fn = PRIMS.get(symbol.id) if isinstance(symbol.id, prims.PrimIDs) else SYMBOLS.get(str(symbol.id))
    if fn is None and prims.OpTags.AUTO_REGISTERED in (symbol.tags or ()):
        fn = getattr(symbol.meta, "__torchfn", None)
    return None if fn is None else rule_for(str(symbol.id).rpartition(":")[2], fn, symbol)
