"""Whether a tensor requires a gradient, asked by a program that thunder traces: thunder knows it of inputs alone."""
from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from thunder.core.dtypes import is_inexact_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import get_tracectx
from thunder.core.transforms import is_constant_for_vjp

from jointtrace.frontends.thunder_grad_mode import modes
from jointtrace.joint.build import STEPS
from jointtrace.joint.expand import rule_of
from jointtrace.joint.symbols import is_view, may_be_view


def requires_grad(tensor: TensorProxy) -> bool:
    """Return whether a tensor of the program that is traced would require a gradient in eager PyTorch."""
    history = _history(get_tracectx())
    wanted, seen = [tensor], {tensor.name}
    while wanted:
        proxy = wanted.pop()
        if history.is_given(proxy) and proxy.requires_grad:
            return True
        operands = [p for bsym in history.makers(proxy) for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
        wanted += [p for p in operands if p.name not in seen]
        seen.update(p.name for p in operands)
    return False


def _history(trace: Any) -> _History:
    """Return what is known so far: the last answer's, while nothing has been traced since."""
    now = modes()
    bsyms = [bsym for scope in trace.scopes for bsym in scope]
    depth = now.functions[0].depth if now.functions else len(trace.scopes)
    outside = sum(map(len, trace.scopes[:depth]))
    if now.history is None or not now.history.is_of(bsyms, outside):
        now.history = _History(bsyms, outside)
    return now.history


class _History:
    """What the tensors of a program are made of so far; `outside` counts the ops before those of a custom function."""

    def __init__(self, bsyms: Sequence[BoundSymbol], outside: int) -> None:
        self.bsyms, self.outside = bsyms, outside
        self.names = {out.name for bsym in bsyms for out in bsym.flat_proxy_outs}
        self.base: dict[str, str] = {}
        self.by_op: dict[str, list[BoundSymbol]] = {}
        self.by_write: dict[str, list[BoundSymbol]] = {}
        for bsym in _parts(bsyms[:outside]):
            self._add(bsym)

    def is_of(self, bsyms: Sequence[BoundSymbol], outside: int) -> bool:
        """Whether these are the ops it was made of."""
        return outside == self.outside and len(bsyms) == len(self.bsyms) and all(map(operator.is_, bsyms, self.bsyms))

    def _add(self, bsym: BoundSymbol) -> None:
        writes = bsym.sym.id is PrimIDs.COPY_
        if writes or _looks(bsym):
            operand = bsym.args[1] if writes else bsym.flat_proxy_args[0]
            self.base.update((out.name, operand.name) for out in bsym.flat_proxy_outs)
        if not _lets_through(bsym):
            return
        for out in bsym.flat_proxy_outs:
            self.by_op.setdefault(out.name, []).append(bsym)
            if writes:
                self.by_write.setdefault(self._root(out.name), []).append(bsym)

    def is_given(self, proxy: TensorProxy) -> bool:
        """Whether the program got a tensor from outside."""
        return proxy.name not in self.names

    def makers(self, proxy: TensorProxy) -> Sequence[BoundSymbol]:
        """Return the differentiable ops that made a tensor, and those that wrote to its memory since."""
        if not is_inexact_dtype(proxy.dtype):
            return ()
        return *self.by_op.get(proxy.name, ()), *self.by_write.get(self._root(proxy.name), ())

    def _root(self, name: str) -> str:
        while name in self.base:
            name = self.base[name]
        return name


def _looks(bsym: BoundSymbol) -> bool:
    return bool(bsym.flat_proxy_args) and bsym.sym.name != "detach" and (is_view(bsym) or may_be_view(bsym))


def _parts(bsyms: Sequence[BoundSymbol]) -> Iterator[BoundSymbol]:
    """Yield what a trace is made of, each as it is differentiated: whole where it has a rule."""
    for bsym in bsyms:
        stays = bsym.sym.is_prim or not bsym.subsymbols or bsym.sym.id in STEPS or not _lets_through(bsym)
        if stays or rule_of(bsym)[0] is not None:
            yield bsym
        else:
            yield from _parts(bsym.subsymbols)


def _lets_through(bsym: BoundSymbol) -> bool:
    """Whether a result has a gradient of its operands: zeros behind a step function, too."""
    takes_the_type_alone = bsym.sym.name.startswith("new_") or bsym.sym.name.endswith("_like")
    stops = bsym.sym.name == "detach" or takes_the_type_alone or is_constant_for_vjp(bsym)
    return bsym.sym.id in STEPS or not stops
