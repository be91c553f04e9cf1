"""What each random op computes, written as draws from seeds and pure operators. A rule returns what stands for the op's
results, or None where it does not know the case."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from jointtrace.ir.op import Op, TensorType, Type, Var

aten = torch.ops.aten
MAX_RANGE = 2**62  # of "bits"


class Builder(Protocol):
    """What a rule writes with."""

    def draw(self, kind: str, type_: TensorType, *, p: float = 1.0) -> Var:
        """Draw numbers of a kind that `ir.draw` has, of the shape, dtype and device of `type_`."""
        ...

    def call(self, overload: Any, *args: Any, type_: Type, **kwargs: Any) -> Var:
        """Call a pure torch operator."""
        ...


Rule = Callable[[dict[str, Any], TensorType, Builder], Any]


def _uniform(args: dict[str, Any], type_: TensorType, build: Builder) -> Var | None:
    low, high = args.get("from", 0.0), args.get("to", 1.0)
    if not type_.dtype.is_floating_point or not _plain(low, high):
        return None
    return _affine(build.draw("uniform", type_), high - low, low, type_, build)


def _normal(args: dict[str, Any], type_: TensorType, build: Builder) -> Var | None:
    if not type_.dtype.is_floating_point:
        return None
    return _affine(build.draw("normal", type_), args.get("std", 1.0), args.get("mean", 0.0), type_, build)


def _affine(drawn: Var, factor: Any, offset: Any, type_: TensorType, build: Builder) -> Var:
    if isinstance(factor, Var) or factor != 1:
        drawn = build.call(aten.mul.Tensor, drawn, factor, type_=type_)
    if isinstance(offset, Var) or offset != 0:
        drawn = build.call(aten.add.Tensor, drawn, offset, type_=type_)
    return drawn


def _randint(args: dict[str, Any], type_: TensorType, build: Builder) -> Var | None:
    low, high = args.get("low", 0), args["high"]
    if low != 0 and not _plain(low, high):
        return None
    if _plain(low, high) and not 0 < high - low <= MAX_RANGE:
        return None
    whole = _with_dtype(type_, torch.int64)
    drawn = build.call(aten.remainder.Scalar, build.draw("bits", whole), high if low == 0 else high - low, type_=whole)
    if low != 0:
        drawn = build.call(aten.add.Tensor, drawn, low, type_=whole)
    return _converted(drawn, whole, type_, build)


def _bernoulli(args: dict[str, Any], type_: TensorType, build: Builder) -> Var | None:
    if "p" not in args:
        args = {**args, "p": args["self"]}
    if not isinstance(args["p"], Var):
        return build.draw("bernoulli", type_, p=args["p"])
    drawn = build.draw("uniform", _with_dtype(type_, torch.float32))
    mask = _with_dtype(type_, torch.bool)
    return _converted(build.call(aten.lt.Tensor, drawn, args["p"], type_=mask), mask, type_, build)


def _dropout(args: dict[str, Any], type_: TensorType, build: Builder) -> tuple[Var, Var] | None:
    keep = 1.0 - args["p"]
    if args["train"] is False:
        return None
    mask = build.draw("bernoulli", _with_dtype(type_, torch.bool), p=keep)
    scale = 1.0 / keep if keep else 0.0
    # the same product as in its gradient: one kernel where the device has one
    return build.call(aten.native_dropout_backward.default, args["input"], mask, scale, type_=type_), mask


def _converted(value: Var, type_: TensorType, wanted: TensorType, build: Builder) -> Var:
    if type_.dtype == wanted.dtype:
        return value
    return build.call(torch.ops.prims.convert_element_type.default, value, wanted.dtype, type_=wanted)


def _with_dtype(type_: TensorType, dtype: torch.dtype) -> TensorType:
    return TensorType(type_.shape, dtype, type_.device, type_.strides)


def _plain(*numbers: Any) -> bool:
    return all(isinstance(number, (int, float)) for number in numbers)


ATEN_RULES: dict[str, Rule] = {
    "aten.rand.default": _uniform,
    "aten.rand_like.default": _uniform,
    "aten.uniform.default": _uniform,
    "aten.randn.default": _normal,
    "aten.randn_like.default": _normal,
    "aten.normal_functional.default": _normal,
    "aten.normal.float_float": _normal,
    "aten.normal.Tensor_float": _normal,
    "aten.normal.float_Tensor": _normal,
    "aten.normal.Tensor_Tensor": _normal,
    "prims.normal.default": _normal,
    "aten.randint.default": _randint,
    "aten.randint.low": _randint,
    "aten.randint_like.default": _randint,
    "aten.randint_like.low_dtype": _randint,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli,
    "aten.native_dropout.default": _dropout,
}
THUNDER_RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {  # and the names of the positional arguments
    "torch.uniform": (_uniform, ("size", "from", "to")),
    "torch.randn": (_normal, ("size",)),
    "torch.randint": (_randint, ("low", "high", "size")),
}


def rule_of(op: Op) -> tuple[Rule, dict[str, Any]] | None:
    """Return the rule for an op, and its arguments by name, defaults included; None where there is no rule."""
    if op.target.name in THUNDER_RULES:
        rule, names = THUNDER_RULES[op.target.name]
        return rule, {**dict(zip(names, op.args, strict=False)), **op.kwargs}
    rule = ATEN_RULES.get(op.target.name)
    if rule is None:
        return None
    arguments = op.target.fn._schema.arguments  # type: ignore[union-attr]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given = dict(zip((argument.name for argument in arguments), op.args, strict=False))
    return rule, {**defaults, **given, **op.kwargs}
