"""Torch functions that thunder does not know, or not in this use, while it traces: one op that calls them.

They must not draw random numbers, write to their arguments or return sizes that depend on values. Gradients are those
of `by_autograd`.
"""
from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import jit_ext, prims
from thunder.core.compile_data import get_compile_data
from thunder.core.dtypes import float32, float64, to_torch_dtype
from thunder.core.interpreter import interpreter_needs_wrap, is_opaque
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import Symbol
from thunder.core.trace import get_tracectx
from torch._subclasses.fake_tensor import FakeTensor

from jointtrace.errors import UnsupportedError
from jointtrace.joint.by_autograd import OURS, faked, flat_outputs, here, printed
from jointtrace.joint.rules import OPERATORS
from jointtrace.joint.symbols import type_of

Fn = Callable[..., Any]
CANNOT = (NotImplementedError, TypeError, RuntimeError, ValueError, AttributeError, LookupError, ArithmeticError,
          AssertionError)  # what thunder raises where it knows a function, but not this use of it
WRONG_IN_THUNDER = frozenset({  # values: padded windows, sizes that do not divide, running statistics, weights
    torch.std_mean,
    torch.var_mean,
    torch.native_batch_norm,
    torch.atleast_2d,
    torch.atleast_3d,
    torch.lerp,
    torch.take_along_dim,
    torch.nn.functional.binary_cross_entropy_with_logits,
    torch.nn.functional.instance_norm,
    torch.nn.functional.interpolate,
    torch.nn.functional.max_pool1d,
    torch.nn.functional.max_pool2d,
    torch.nn.functional.max_pool3d,
    torch.nn.functional.upsample_nearest,
})
WRONG_IF_EMPTY = frozenset({torch.nn.functional.cross_entropy, torch.nn.functional.group_norm})  # no gradient
WRONG_IF_UNBIASED = frozenset({torch.std, torch.var})

if ltorch.unfold.id == "torch.nn.functional.unfold":  # thunder takes Tensor.unfold for its namesake
    object.__setattr__(ltorch.unfold, "id", "torch.Tensor.unfold")


def attribute_of_tensors(attribute: str) -> Any:
    """Return what stands for an attribute of tensors that thunder's have not; None where torch has no such method."""
    if attribute == "layout":
        return torch.strided  # thunder has no other
    fn = getattr(torch.Tensor, attribute, None)
    internal = attribute.startswith("_") or attribute.endswith("_")
    return None if internal or not inspect.isroutine(fn) else operator(fn)


def lookaside(fn: Any, arguments: Sequence[Any]) -> Callable[..., Any] | None:
    """Return what thunder's interpreter calls instead of `fn`; None where thunder does well by itself.

    Args:
        fn: what the program calls.
        arguments: thunder's wrapped positional arguments.
    """
    if fn is torch._ops.OpOverloadPacket.__call__:
        return _prepared(_call_overloaded) if arguments[0].value not in ltorch._torch_to_thunder_function_map else None
    known = ltorch._torch_to_thunder_function_map.get(fn)
    unbiased = fn in WRONG_IF_UNBIASED and any(isinstance(argument.value, bool) for argument in arguments)
    if fn in WRONG_IN_THUNDER or unbiased:
        chosen = operator(fn)
    elif fn is torch.nn.functional.dropout:
        chosen = _dropout
    elif fn is torch.nn.functional.normalize:
        chosen = _normalize
    elif fn is TensorProxy.__mod__:
        chosen = ltorch.remainder  # which thunder knows, but not as `%`
    elif fn is torch.nn.functional.silu:
        chosen = _in_two_steps(ltorch.silu, known)
    elif isinstance(known, Symbol):
        chosen = _unless_empty(known, fn) if fn in WRONG_IF_EMPTY else with_autograd_behind(known, fn)
        chosen = _in_two_steps(known, chosen)
    elif _is_unknown_to_thunder(fn) and any(map(_holds_tensor, arguments)):
        chosen = operator(fn)
    else:
        return None
    return _prepared(chosen)


def _call_overloaded(packet: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(packet)(*args, **kwargs)


def _dropout(a: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """thunder's dropout; where all is dropped, thunder returns zeros without a gradient, eager zeros with one."""
    return ltorch.mul(a, 0.0) if training and p == 1 else ltorch.dropout(a, p, training, inplace)


def _normalize(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """In thunder, rows of zeros have no gradient: the derivative of its norm at 0 is infinite. In eager it is 0."""
    if p != 2.0 or input.dtype not in (float32, float64) or out is not None:
        return operator(torch.nn.functional.normalize)(input, p, dim, eps, out)
    squares = ltorch.sum(ltorch.mul(input, input), dim, True)
    return ltorch.true_divide(input, ltorch.sqrt(ltorch.clamp(squares, min=eps * eps)))


@functools.cache
def _in_two_steps(symbol: Symbol, call: Callable[..., Any]) -> Callable[..., Any]:
    """Write in place what the function computes: as one step it is taken apart, and its own rule not used."""
    signature = inspect.signature(symbol.meta)
    if "inplace" not in signature.parameters:
        return call

    @functools.wraps(call)
    def computed_then_written(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if not given.arguments.pop("inplace", False):
            return call(*args, **kwargs)
        return ltorch._copy_(args[0], call(*given.args, **given.kwargs))

    return computed_then_written


@functools.cache
def _unless_empty(symbol: Symbol, fn: Fn) -> Callable[..., Any]:
    known = with_autograd_behind(symbol, fn)

    @functools.wraps(fn)
    def call(input: Any, *args: Any, **kwargs: Any) -> Any:
        return (operator(fn) if 0 in input.shape else known)(input, *args, **kwargs)

    return call


@functools.cache
def _prepared(chosen: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = interpreter_needs_wrap(jit_ext.record_source_loc_in_symbol_header(chosen))
    return jit_ext.ensure_recursive_proxies(wrapped)


def _is_unknown_to_thunder(fn: Any) -> bool:
    module = getattr(fn, "__module__", None)
    method = module is None and getattr(fn, "__objclass__", None) is torch._C.TensorBase
    public = method or (str(module).startswith("torch") and not str(module).startswith("torch._C"))  # else it asks only
    return public and is_opaque(fn) and fn not in jit_ext._general_jit_lookaside_map and (
        not fn.__name__.startswith("__"))


def _holds_tensor(argument: Any) -> bool:
    value = argument.value
    items = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(item, TensorProxy) for item in items)


@functools.cache
def operator(fn: Fn) -> Symbol:
    """Return a symbol that computes a torch function which thunder does not know."""
    name = fn.__name__ or "operator"
    unique = printed(_full_name(fn))

    def meta(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            raise UnsupportedError(f"{name}{here()} with out=...; write with copy_ what it returns")
        with faked(name, args, kwargs) as (leaves, fake_args, fake_kwargs):
            outputs = fn(*fake_args, **fake_kwargs)
            if not any(isinstance(out, FakeTensor) for out in flat_outputs(outputs)):
                raise UnsupportedError(f"{name}{here()} returns no tensor: what it tells of its argument may hold for "
                                       "other strides only; leave it out of the compiled function")
            _note_views(name, symbol, leaves, flat_outputs(outputs))
        flat, spec = tree_flatten(tuple(outputs) if isinstance(outputs, tuple) else outputs)
        result = tree_unflatten([ltorch._fake_type_to_thunder(leaf) for leaf in flat], spec)
        _check_autocast(name, fn, args, kwargs, result)
        return result

    meta.__dict__["__torchfn"] = fn
    runs = OPERATORS.register_operator(unique, meta=meta, fn=fn)
    symbol = Symbol(name, meta, id=f"{OURS}{unique}:{_full_name(fn)}", is_prim=True,
                    tags=(prims.OpTags.AUTO_REGISTERED,))
    OPERATORS.register_implementation(symbol, runs)
    return symbol


def _full_name(fn: Any) -> str:
    if isinstance(fn, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{fn}"
    return f"{getattr(fn, '__module__', None) or 'torch.Tensor'}.{fn.__name__ or 'operator'}"


def _check_autocast(name: str, fn: Fn, args: Any, kwargs: Any, result: Any) -> None:
    """Raise where autocast makes eager compute in another dtype: thunder inserts casts for functions it knows."""
    data: Any = get_compile_data()
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, TensorProxy)]
    device = torch.device(type_of(tensors[0]).device).type if tensors else "cpu"
    dtype = None if data is None or data.autocast_stack.is_empty() else (
        data.autocast_stack.get_dtype_for_device_if_enabled(device))
    if dtype is None:
        return
    with faked(name, args, kwargs) as (_, fake_args, fake_kwargs), _autocast(device, to_torch_dtype(dtype)):
        eager = [out.dtype for out in flat_outputs(fn(*fake_args, **fake_kwargs)) if isinstance(out, FakeTensor)]
    ours = [to_torch_dtype(out.dtype) for out in tree_flatten(result)[0] if isinstance(out, TensorProxy)]
    if ours != eager:
        raise UnsupportedError(f"{name}{here()} under torch.autocast, where it computes in another dtype; convert its "
                               "arguments and leave it out of autocast")


@contextlib.contextmanager
def _autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Turn autocast on; torch.autocast itself is thunder's while it traces."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()


def _note_views(name: str, symbol: Symbol, given: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Say of a symbol that its results look at its first tensor, which in-place operations must know."""
    storages = [t.untyped_storage()._cdata for t in given if isinstance(t, FakeTensor)]
    seen = {o.untyped_storage()._cdata for o in outputs if isinstance(o, FakeTensor)}.intersection(storages)
    if seen and seen != {storages[0]}:
        raise UnsupportedError(f"{name}{here()} returns views of several arguments; clone them first")
    if seen:
        ltorch._syms_returning_views.add(symbol)


@functools.cache
def with_autograd_behind(symbol: Symbol, fn: Fn) -> Callable[..., Any]:
    """Return a call of thunder's `symbol` for `fn`; where thunder cannot do what is asked, torch does."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        trace: Any = get_tracectx()
        depth, length = len(trace.scopes), len(trace.peek_scope())
        try:
            result = symbol(*args, **kwargs)
            if prims.OpTags.AUTO_REGISTERED in (symbol.tags or ()):
                _check_autocast(symbol.name, fn, args, kwargs, result)
            return result
        except UnsupportedError:
            raise
        except CANNOT as error:
            del trace.scopes[depth:], trace.peek_scope()[length:]
            if not any(isinstance(leaf, Proxy) for leaf in tree_flatten((args, kwargs))[0]):
                raise
            try:
                return operator(fn)(*args, **kwargs)
            except UnsupportedError as ours:
                raise ours from error

    return call
