"""Gradient rules for pointwise functions whose gradient by thunder's decomposition is wrong where a branch ends.

thunder makes them of `where`, `exp` and products. At a bound of `clamp` that gives no gradient, where torch gives one;
the branch not taken overflows, and infinity times 0 makes the gradient of `elu` at 100 not a number; and a value that
is not a number becomes 0 in `relu`. Formulas are those of torch's derivatives.yaml, by its operators.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from numbers import Number
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes, prims
from thunder.core.prims import get_grad, put_grad
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.executors import torchex

from jointtrace.joint.by_autograd import faked
from jointtrace.joint.rules import ATEN, OPERATORS

SELU_SCALE, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
Backward = Callable[..., TensorProxy]  # of the cotangent, the operand, the result and the other arguments by name


def _operator(name: str, fn: Callable[..., Any]) -> Any:
    return OPERATORS.register_operator(
        name, meta=lambda g, *rest: TensorProxy(like=g, requires_grad=False), fn=fn)


def _differentiable(a: Any) -> bool:
    return isinstance(a, TensorProxy) and dtypes.is_float_dtype(a.dtype)


def _register(symbol: Symbol, runs: Symbol, backward: Backward, checker: Callable[..., bool] | None = None) -> None:
    """Let `backward` be the rule of a symbol that `runs` computes, unless it writes in place."""
    signature = inspect.signature(symbol.meta)

    def rule(*args: Any, **kwargs: Any) -> TensorProxy:
        out = symbol(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        a, *rest = given.arguments.items()
        put_grad(a[1], backward(get_grad(out), a[1], out, **{k: v for k, v in rest if k != "inplace"}))
        return out

    def applies(*args: Any, **kwargs: Any) -> bool:
        given = signature.bind(*args, **kwargs).arguments
        return _differentiable(args[0]) and not given.get("inplace") and (checker is None or checker(*args, **kwargs))

    OPERATORS.register_implementation(symbol, runs, grad_transform=rule, checker=applies)


threshold_backward = _operator("threshold_backward", ATEN.threshold_backward.default)
_register(ltorch.relu, torchex.relu, lambda g, a, out: threshold_backward(g, out, 0))

hardtanh_backward = _operator("hardtanh_backward", ATEN.hardtanh_backward.default)
_register(ltorch.relu6, torchex.relu6, lambda g, a, out: hardtanh_backward(g, a, 0.0, 6.0))
_register(ltorch.hardtanh, torchex.hardtanh,
          lambda g, a, out, min_val, max_val: hardtanh_backward(g, a, min_val, max_val))

elu_backward = _operator("elu_backward", ATEN.elu_backward.default)  # of alpha, scale, scale of the input
_register(ltorch.elu, torchex.elu, lambda g, a, out, alpha: elu_backward(g, alpha, 1.0, 1.0, False, a))
_register(ltorch.celu, torchex.celu, lambda g, a, out, alpha: elu_backward(g, alpha, 1.0, 1.0 / alpha, False, a))
_register(ltorch.selu, torchex.selu, lambda g, a, out: elu_backward(g, SELU_ALPHA, SELU_SCALE, 1.0, False, a))

hardsigmoid_backward = _operator("hardsigmoid_backward", ATEN.hardsigmoid_backward.default)
_register(ltorch.hardsigmoid, torchex.hardsigmoid, lambda g, a, out: hardsigmoid_backward(g, a))

hardswish_backward = _operator("hardswish_backward", ATEN.hardswish_backward.default)
_register(ltorch.hardswish, torchex.hardswish, lambda g, a, out: hardswish_backward(g, a))

hardshrink_backward = _operator("hardshrink_backward", ATEN.hardshrink_backward.default)
_register(ltorch.hardshrink, torchex.hardshrink, lambda g, a, out, lambd: hardshrink_backward(g, a, lambd))

mish_backward = _operator("mish_backward", ATEN.mish_backward.default)
_register(ltorch.mish, torchex.mish, lambda g, a, out: mish_backward(g, a))

sigmoid = _operator("sigmoid", torch.sigmoid)
sigmoid_backward = _operator("sigmoid_backward", ATEN.sigmoid_backward.default)
_register(ltorch.sigmoid, sigmoid, lambda g, a, out: sigmoid_backward(g, out))


def _clamp_backward(g: TensorProxy, a: TensorProxy, out: TensorProxy, min: Any, max: Any) -> TensorProxy:
    if min is None or max is None:
        inside = ltorch.le(a, max) if min is None else ltorch.ge(a, min)
    else:
        inside = ltorch.logical_and(ltorch.ge(a, min), ltorch.le(a, max))
    return ltorch.where(inside, g, 0.0)


_register(ltorch.clamp, torchex.clamp, _clamp_backward,
          lambda a, min=None, max=None: not isinstance(min, TensorProxy) and not isinstance(max, TensorProxy))


def _pow_backward(g: TensorProxy, a: TensorProxy, out: TensorProxy, b: Any) -> TensorProxy:
    if b == 0:
        return ltorch.zeros_like(a)
    return ltorch.mul(g, ltorch.mul(b, ltorch.pow(a, b - 1)))


_register(prims.pow, torchex.pow, _pow_backward, lambda a, b: isinstance(b, Number))


def _div_meta(a: Any, b: Any, rounding_mode: str) -> Any:
    with faked("div", (a, b), {}) as (_, operands, _):
        return ltorch._fake_type_to_thunder(torch.div(*operands, rounding_mode=rounding_mode))


div_rounded = OPERATORS.register_operator(
    "div_rounded", meta=_div_meta, fn=lambda a, b, rounding_mode: torch.div(a, b, rounding_mode=rounding_mode))


def _div(a: Any, b: Any, /, *, rounding_mode: str, out: None = None) -> TensorProxy:
    """A step function, also where it divides by 0."""
    result = div_rounded(a, b, rounding_mode)
    get_grad(result)  # so that the result requires a gradient
    for operand in (a, b):
        if isinstance(operand, TensorProxy):
            put_grad(operand, ltorch.zeros_like(operand))
    return result


OPERATORS.register_implementation(
    ltorch.div, grad_transform=_div,
    execution_transform=lambda a, b, *, rounding_mode, out=None: div_rounded(a, b, rounding_mode),
    checker=lambda a, b, *, rounding_mode=None, out=None: rounding_mode is not None)
