"""Statements of generated programs: each function proposes one for a builder, or None where its operands are missing.

A proposal may still be wrong for its operands: the builder runs it and drops what raises.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from conformance.fuzz.program import Line
from hypothesis import strategies as st

if TYPE_CHECKING:
    from conformance.fuzz.generate import Builder

Maker = Callable[["Builder"], "Line | None"]
BOUNDED = ("sin", "cos", "tanh", "sigmoid", "neg", "abs", "relu")
UNARY = (
    *(f"torch.{name}({{x}})" for name in BOUNDED), "F.gelu({x})", "F.silu({x})", "F.softplus({x})", "{x}.erf()",
    "{x}.tanh().exp()", "({x} * {x} + 1).sqrt()", "({x}.abs() + 1).log()", "1 / ({x} * {x} + 1)", "{x}.square()",
    "{x}.clamp(-0.5, 0.8)", "F.leaky_relu({x}, 0.1)", "{x} * 2", "1 - {x}", "{x} / 3 + 0.5", "{x} ** 3",
    "torch.where({x} > 0, {x}, {x} * 0.1)", "F.elu({x})", "{x}.clone()", "{x}.contiguous()",
)
BINARY = (
    "{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} / ({y} * {y} + 1)", "torch.maximum({x}, {y})",
    "torch.where({x} > {y}, {x}, {y} * 2)", "torch.add({x}, {y}, alpha=2)", "torch.addcmul({x}, {x}, {y}, value=0.5)",
)
REDUCTIONS = (
    "{x}.sum()", "{x}.mean()", "{x}.sum({d})", "{x}.mean({d}, keepdim=True)", "{x}.amax({d})", "{x}.softmax({d})",
    "{x}.log_softmax({d})", "torch.logsumexp({x}, {d})", "{x}.var({d}, correction=0)", "{x}.cumsum({d})",
    "F.layer_norm({x}, {x}.shape[-1:])", "({x} * {x} + 1).prod({d})",
)
VIEWS = (
    "{x}.view(-1)", "{x}.reshape(-1)", "{x}.transpose(0, {d})", "{x}.unsqueeze({d})", "{x}[0]", "{x}[1:]",
    "{x}[..., ::2]", "{x}[..., -1]", "{x}.unsqueeze(0).expand(2, *{x}.shape)", "{x}.flatten()", "{x}.t()",
    "{x}.narrow({d}, 0, 1)", "{x}.select({d}, 0)", "{x}.squeeze()", "{x}[:, None]", "{x}.permute(1, 0)",
)
SEVERAL = (
    "{x}.split(1, {d})", "{x}.chunk(2, {d})", "{x}.unbind({d})", "{x}.max({d})", "{x}.topk(1, {d})", "{x}.sort({d})",
    "torch.split({x}, 2)",
)
INPLACE = (
    "{t}.mul_({n})", "{t}.add_({y})", "{t}.mul_({y})", "{t}.sub_({y}, alpha=2)", "{t}.copy_({y})", "{t}.relu_()",
    "{t}.zero_()", "{t}[0] = {n}", "{t}[0] *= {n}", "{t}[..., 1:] += {n}", "{t}[:] = {y}",
    "{t}.div_({n})", "{t}.exp_()", "{t}.tanh_()", "{t}.clamp_(max=0.5)", "{t} += {y}", "{t}.view(-1).mul_({n})",
    "{t}[0].add_({y})", "{t}.t().mul_({y})",
)
DRAWN = ("torch.rand_like({x})", "torch.randn_like({x})", "torch.bernoulli({x}.sigmoid())",
         "torch.rand({x}.shape, dtype={x}.dtype)", "torch.randn({x}.shape, dtype={x}.dtype)")
ZEROS = " + 0 * {x}"  # bernoulli gives its operand a gradient of zeros


def unary(b: Builder) -> Line | None:
    return b.assign(b.choose(UNARY), x=b.pick(is_float))


def binary(b: Builder) -> Line | None:
    return b.assign(b.choose(BINARY), **_two(b))


def reduction(b: Builder) -> Line | None:
    x = b.pick(has_dimensions)
    return b.assign(b.choose(REDUCTIONS), x=x, d=_dimension(b, x))


def view(b: Builder) -> Line | None:
    x = b.pick(has_dimensions)
    return b.assign(b.choose(VIEWS), x=x, d=_dimension(b, x))


def matmul(b: Builder) -> Line | None:
    x = b.pick(is_matrix)
    if x is None:
        return None
    size = b.env[x].shape[1]
    y = b.pick(lambda t: is_matrix(t) and t.shape[0] == size)
    if y is not None and b.env[y].dtype == b.env[x].dtype:
        return b.assign("{x} @ {y}", x=x, y=y)
    y = b.pick(lambda t: is_matrix(t) and t.shape[1] == size and t.dtype == b.env[x].dtype)
    return b.assign(b.choose(("F.linear({x}, {y})", "{x} @ {y}.t()", "torch.einsum('ij,kj->ik', {x}, {y})")), x=x, y=y)


def several(b: Builder) -> Line | None:
    """An operation with several results, some of which the program may never use."""
    x = b.pick(has_dimensions)
    return b.assign_several(b.choose(SEVERAL), x=x, d=_dimension(b, x))


def joined(b: Builder) -> Line | None:
    x = b.pick(has_dimensions)
    y = b.pick(lambda t: x is not None and _alike(t, b.env[x]))
    form = b.choose(("torch.cat(({x}, {y}), {d})", "torch.stack(({x}, {y}))", "torch.cat(({x}, {y}, {x}))"))
    return b.assign(form, x=x, y=y, d=_dimension(b, x))


def indexed(b: Builder) -> Line | None:
    x, i = b.pick(has_dimensions), b.pick(is_index)
    if x is None or i is None:
        return None
    forms = ["{x}[{i}.clamp(0, {last})]"]
    if b.env[i].ndim == 1:
        forms.append("torch.index_select({x}, 0, {i}.clamp(0, {last}))")
    if b.env[x].ndim == b.env[i].ndim:
        forms.append("torch.gather({x}, 0, {i}.clamp(0, {last}))")
    if b.env[x].ndim == 2:
        forms.append("F.embedding({i}.clamp(0, {last}), {x})")
    return b.assign(b.choose(forms), x=x, i=i, last=b.env[x].shape[0] - 1)


def index(b: Builder) -> Line | None:
    return b.assign(b.choose(("{x}.argmax({d})", "{x}.argsort({d})")), **_with_dimension(b))


def cast(b: Builder) -> Line | None:
    if b.smooth:
        return None
    return b.assign(b.choose(("{x}.float()", "{x}.double()", "{x}.to(torch.float32)")), x=b.pick(is_float))


def detached(b: Builder) -> Line | None:
    if b.smooth:
        return None
    form = b.choose(("{x}.detach()", "({x}.detach() * {x})", "{x}.floor()", "{x}.sign()"))
    return b.assign(form, x=b.pick(is_float))


def without_grad(b: Builder) -> Line | None:
    """A statement under no_grad; none that may make a view, as eager says of it that it requires a gradient."""
    if b.smooth:
        return None
    line = b.choose((matmul, binary, joined))(b)
    return line and Line(f"with torch.no_grad():\n    {line.text}")


def custom(b: Builder) -> Line | None:
    """A custom autograd function; of two tensors, as Dynamo knows none of one tensor twice."""
    x = b.pick(is_float)
    y = b.pick(lambda t: x is not None and t is not b.env[x] and _alike(t, b.env[x]))
    return b.assign("Product.apply({x}, {y})", x=x, y=y)


def inplace(b: Builder) -> Line | None:
    """A write in place, to a value that is no argument the program must leave alone."""
    t = b.pick_target()
    if t is None:
        return None
    y = b.pick(lambda v: _alike(v, b.env[t]))
    form = b.choose(INPLACE)
    if "{y}" in form and (y is None or y == t):
        form = "{t}.mul_({n})"
    return b.write(form, t=t, y=y, n=b.choose(("2", "0.5", "-1")))


def random(b: Builder) -> Line | None:
    """Numbers drawn; recorded as they are."""
    form = b.choose(DRAWN)
    return b.drawn(form, "DRAWS[{k}]" + ZEROS * ("bernoulli" in form), "{v}.clone()", x=b.pick(is_float))


def dropout(b: Builder) -> Line | None:
    """Dropout of something without zeros; recorded is its mask."""
    p = b.choose(("0.3", "0.5"))
    return b.drawn("F.dropout({x}.sigmoid() + 0.5, {p})", "({x}.sigmoid() + 0.5) * DRAWS[{k}] / (1 - {p})",
                   "{v}.ne(0)", x=b.pick(is_float), p=p)


def is_float(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point


def has_dimensions(t: torch.Tensor) -> bool:
    return is_float(t) and t.ndim > 0


def is_matrix(t: torch.Tensor) -> bool:
    return is_float(t) and t.ndim == 2


def is_index(t: torch.Tensor) -> bool:
    return t.dtype == torch.int64 and t.ndim > 0


def _two(b: Builder) -> dict[str, Any]:
    x = b.pick(is_float)
    return {"x": x, "y": b.pick(lambda t: is_float(t) and x is not None and _fit(t, b.env[x]))}


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _fit(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(one.shape[::-1], other.shape[::-1], strict=False))


def _dimension(b: Builder, x: str | None) -> int | None:
    return None if x is None else b.draw(st.integers(0, max(b.env[x].ndim - 1, 0)))


def _with_dimension(b: Builder) -> dict[str, Any]:
    x = b.pick(has_dimensions)
    return {"x": x, "d": _dimension(b, x)}


ALWAYS: tuple[Maker, ...] = (
    unary, unary, binary, binary, binary, matmul, reduction, reduction, view, view, several, joined, indexed, index,
    inplace, inplace, random, dropout, cast, detached, without_grad, custom)
