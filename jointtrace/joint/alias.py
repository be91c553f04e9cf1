"""In-place operations and views in the joint trace: what a write to one alias means for the gradients of the others.

thunder runs an in-place operation as `copy_` and renames every alias before each use (`update_aliases`). For gradients
each value must be what it is as a function: after a write through a view, the tensor it views holds its old value with
a part replaced, and every other view of it is that view of the new value. So here
- a write through a view makes a new version of the viewed tensor (`refresh`), whose cotangent goes to what was
  written where the view looks, and to the old version everywhere else;
- another alias is made again from the newest version, by its own chain of views, when it is next used.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from thunder.core import prims
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx

from jointtrace.ir.op import Op, Phase, Tag, Target, TensorType, Var
from jointtrace.joint.claim import Claims, run_ops
from jointtrace.joint.expand import Get, Put, rule_of
from jointtrace.joint.symbols import is_view, proxy_of, source_of, type_of

if TYPE_CHECKING:
    from jointtrace.joint.build import Walk


@dataclass(frozen=True)
class Look:
    """One view in a chain: the symbol, and which of its results."""

    bsym: BoundSymbol
    index: int


class Aliases:
    """Which storage each value looks at, through which views, and in which version."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.root: dict[str, str] = {}
        self.path: dict[str, tuple[Look, ...]] = {}
        self.version: dict[str, int] = {}  # of a root: how often it was written
        self.seen: dict[str, int] = {}  # of a value: the version it shows
        self.latest: dict[str, str] = {}  # of a root: the value that is its newest version
        self.writes = any(writes(b) for b in walk.computation.bound_symbols)

    def handles(self, bsym: BoundSymbol) -> bool:
        """Whether a symbol is about aliases; also takes note of views."""
        if not self.writes:
            return False
        if writes(bsym):
            return True
        if bsym.flat_proxy_args and bsym.flat_proxy_outs and is_view(bsym):
            self.note_view(bsym)
        return False

    def process(self, bsym: BoundSymbol) -> list[Any]:
        """Add the ops of `update_aliases` or `copy_`; return the subsymbols of anything else that writes."""
        if bsym.sym.id is prims.PrimIDs.UPDATE_ALIASES:
            for old, new in zip(bsym.args[0], bsym.output, strict=True):
                self.update(old, new)
            return []
        if bsym.sym.id is prims.PrimIDs.COPY_:
            self.write(bsym)
            return []
        return list(bsym.subsymbols)

    def note_view(self, bsym: BoundSymbol) -> None:
        """Remember that the results of `bsym` look at its first operand."""
        base = self.walk.name(bsym.flat_proxy_args[0])
        for index, out in enumerate(bsym.flat_proxy_outs):
            self.root[out.name] = self.root_of(base)
            self.path[out.name] = (*self.path.get(base, ()), Look(bsym, index))
            self.seen[out.name] = self.seen.get(base, 0)

    def root_of(self, name: str) -> str:
        return self.root.get(name, name)

    def is_stale(self, name: str) -> bool:
        """Whether the storage of a value was written since the value was made."""
        return self.seen.get(name, 0) != self.version.get(self.root_of(name), 0)

    def update(self, old: TensorProxy, new: TensorProxy) -> None:
        """Let `new` be what `old` shows now."""
        name = self.walk.name(old)
        if not self.is_stale(name):
            self.walk.names[new.name] = name
            return
        root = self.root_of(name)
        current = self.latest[root]
        for look in self.path.get(name, ()):
            current = self.replay(look, current)
        self.walk.names[new.name] = current
        self.root[current], self.path[current] = root, self.path.get(name, ())
        self.seen[current] = self.version[root]

    def replay(self, look: Look, base: str) -> str:
        """Apply one view of a chain to another base; return the name of its result."""
        walk = self.walk
        operand = look.bsym.flat_proxy_args[0]
        held = walk.names.get(operand.name)
        walk.names[operand.name] = base
        with tracectx(TraceCtx(None)):
            proxies = {variableify(p): proxy_of(walk.fresh(p.name), type_of(p)) for p in _made(look.bsym)}
        out = proxies[variableify(look.bsym.flat_proxy_outs[look.index])].name
        pending: list[Any] = [look.bsym.from_bsym_swap_proxies(proxies)]
        while pending:
            pending[:0] = walk.process(pending.pop(0))
        if held is None:
            del walk.names[operand.name]
        else:
            walk.names[operand.name] = held
        return out

    def write(self, bsym: BoundSymbol) -> None:
        """Add a `copy_`, and where it writes through a view a new version of what is viewed."""
        walk = self.walk
        target = walk.name(bsym.args[1])
        differentiable = walk.is_differentiable(bsym)
        walk.instantiate(bsym, walk.template(bsym, rule_of(bsym)[0] if differentiable else None, True))
        root, path, out = self.root_of(target), self.path.get(target, ()), bsym.output.name
        self.version[root] = self.version.get(root, 0) + 1
        self.root[out], self.path[out], self.seen[out] = root, path, self.version[root]
        before = self.latest.get(root, root)
        self.latest[root] = self.refresh(before, out, path, bsym) if path else out

    def refresh(self, before: str, written: str, path: Sequence[Look], bsym: BoundSymbol) -> str:
        """Add the new version of the tensor `before`, a part of which was replaced by `written`."""
        walk = self.walk
        root = self.root_of(written)
        new = walk.fresh(before)
        walk.types[new] = walk.types[before]
        walk.ops.append(_own_op("refresh", lambda old, _: old, (Var(before), Var(written)), new,
                                frozenset({Tag.MUTATES, Tag.VIEW}), (before,)).replace(source=source_of(bsym)))
        self.version[root] += 1  # the refresh counts as a write, so that aliases are made again from it
        self.root[new], self.path[new], self.seen[new] = root, (), self.version[root]
        if before in walk.needs or written in walk.needs:
            walk.needs.add(new)
            walk.backward.append(self._backward(new, before, written, path))
        return new

    def _backward(self, new: str, before: str, written: str, path: Sequence[Look]) -> list[Any]:
        walk = self.walk
        look = _look_through(path, walk.executors)
        grad, part = f"cotangent of {new}", walk.fresh(f"d_{written}")
        walk.types[part] = walk.types[written]
        steps: list[Any] = [Get(new, grad)]
        through = _own_op("view_through", look, (Var(grad),), part, frozenset()).replace(phase=Phase.BW)
        steps += [through, Put(written, part)]
        if not _covers(walk.types[written], walk.types[before]):
            rest = walk.fresh(f"d_{before}")
            walk.types[rest] = walk.types[before]
            steps += [_own_op("zero_through", lambda g: zero_through(g, look), (Var(grad),), rest,
                              frozenset()).replace(phase=Phase.BW), Put(before, rest)]
        return steps


def zero_through(grad: torch.Tensor, look: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return `grad` with zeros where the view `look` looks; same shape and dtype."""
    positions = look(torch.arange(grad.numel(), device=grad.device).view(grad.shape)).reshape(-1)
    return grad.reshape(-1).index_fill(0, positions, 0).view(grad.shape)


def _look_through(path: Sequence[Look], executors: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a chain of views as one function of a tensor."""
    programs = []
    for look in path:
        trace = TraceCtx(None)
        trace.names = {p.name for p in (*look.bsym.flat_proxy_args, *look.bsym.flat_proxy_outs)}
        with tracectx(trace):
            ops = Claims(executors, trace).claim(look.bsym)
        programs.append((ops, look.bsym.flat_proxy_args[0].name, look.bsym.flat_proxy_outs[look.index].name))

    def run(tensor: torch.Tensor) -> torch.Tensor:
        for ops, operand, result in programs:
            tensor = run_ops(ops, {operand: tensor}, Var(result))
        return tensor

    return run


def _covers(part: Any, whole: Any) -> bool:
    return isinstance(part, TensorType) and math.prod(map(int, part.shape)) == math.prod(map(int, whole.shape))


def _own_op(name: str, fn: Callable[..., Any], args: tuple[Any, ...], out: str, tags: frozenset[Tag],
            writes: tuple[str, ...] = ()) -> Op:
    symbol = Symbol(name, meta=None, id=f"jointtrace.{name}")
    payload = BoundSymbol(symbol, (), {}, None, _call_ctx={name: fn})
    return Op(Target(f"jointtrace.{name}", fn), args, out=Var(out), tags=tags, writes=writes, payload=payload)


def _made(bsym: BoundSymbol) -> list[TensorProxy]:
    """Return the proxies that a symbol and its subsymbols make, each once."""
    made = {p.name: p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)}
    for sub in bsym.subsymbols:
        made.update((p.name, p) for p in _made(sub))
    given = {p.name for p in bsym.flat_proxy_args}
    return [p for name, p in made.items() if name not in given]


def writes(bsym: BoundSymbol) -> bool:
    """Whether a symbol or one of its subsymbols writes in place."""
    return bsym.sym.id in (prims.PrimIDs.COPY_, prims.PrimIDs.UPDATE_ALIASES) or any(map(writes, bsym.subsymbols))
