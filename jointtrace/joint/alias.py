"""In-place operations and views: what a write to one alias means for the values and gradients of the others.

thunder keeps an in-place operation as `copy_`, whose result is the written tensor. For gradients each value must be
what it is as a function: after a write through a view, the viewed tensor is its old value with a part replaced, and
every other view of it is that view of the new value. So a read of a value whose memory was written since is redirected
- to the value that was written, where it looks at the same part;
- else to its own chain of views applied to the newest version of the viewed tensor, which `refresh` makes of the old
  version and the written part: its cotangent goes to the written part where the view looks, to the old one elsewhere.

An argument that is written a value with a gradient gets that gradient's history, as in eager PyTorch: what it holds in
the end is one more output. A write to what was taken for a view, but is a copy when the program runs, raises there.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.proxies import ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx

from jointtrace.errors import UnsupportedError
from jointtrace.ir.op import Op, Phase, Tag, Target, TensorType, Var
from jointtrace.joint.claim import Claims, run_ops
from jointtrace.joint.expand import Get, Put, Rest, is_library_symbol, rule_of
from jointtrace.joint.symbols import is_view, may_be_view, names_in, proxy_of, source_of, type_of, where

if TYPE_CHECKING:
    from jointtrace.joint.build import Walk


@dataclass(frozen=True, eq=False)
class Look:
    """One view in a chain: the symbol, which of its results, and whether it is a view whatever the strides."""

    bsym: BoundSymbol
    index: int
    certain: bool
    detached: bool


Path = tuple[Look, ...]


@dataclass(frozen=True)
class Write:
    """A write that the viewed tensor does not show yet."""

    name: str
    path: Path
    bsym: BoundSymbol
    detached: bool


class Memory:
    """What one tensor and all views of it share: how often it was written, and the values at its newest version."""

    def __init__(self, root: str) -> None:
        self.version = 0
        self.whole = root  # newest value of the whole tensor, but for `pending`
        self.pending: Write | None = None
        self.has_history = False  # whether autograd sees one of the writes
        self.current: dict[Path, str] = {}
        self.apart: dict[Path, str] = {}  # of a detached alias that was written to: what it has its own gradient from


class Aliases:
    """Which memory each value looks at, through which views, and in which version."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.active = any(writes(b) for b in walk.computation.bound_symbols)
        self.memory: dict[str, Memory] = {}
        self.root: dict[str, str] = {}
        self.path: dict[str, Path] = {}
        self.seen: dict[str, int] = {}  # of a value: the version it shows
        self.effects: set[str] = set()  # results of writes that are no user's in-place operation

    # reads

    def read(self, proxies: Sequence[Any]) -> None:
        """Let each proxy stand for what its memory holds now."""
        if self.active:
            for proxy in proxies:
                if isinstance(proxy, TensorProxy):
                    self.walk.names[proxy.name] = self.newest(self.walk.name(proxy))

    def newest(self, name: str) -> str:
        """Return the value that `name` shows now."""
        memory = self.memory.get(self.root.get(name, name))
        if memory is None or self.seen.get(name, 0) == memory.version:
            return name
        return self.newest_at(memory, self.path.get(name, ()))

    def newest_at(self, memory: Memory, path: Path) -> str:
        """Return what a chain of views shows now."""
        start = next((n for n in range(len(path), 0, -1) if path[:n] in memory.current), 0)
        current = memory.current[path[:start]] if start else self.newest_whole(memory)
        for end, look in enumerate(path[start:], start + 1):
            current = self.replay(look, current)
            if path[:end] in memory.apart:
                self.link(current, memory.apart[path[:end]])
            memory.current[path[:end]] = current
        return current

    def newest_whole(self, memory: Memory) -> str:
        """Return the newest value of a whole tensor; after that, other values of its memory are read anew."""
        if memory.pending is not None:
            write, memory.pending = memory.pending, None
            memory.version += 1
            memory.current.clear()
            memory.whole = self.refresh(memory.whole, write)
        return memory.whole

    # views

    def note_view(self, bsym: BoundSymbol) -> bool:
        """Remember that the results of `bsym` look at its first operand, if they do or may; return whether."""
        operands = [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
        certain = self.active and is_view(bsym)
        if not self.active or not operands or not (certain or may_be_view(bsym)):
            return False
        base = self.walk.name(operands[0])
        certain = certain and not _may_copy(bsym)
        detached = bsym.sym.name == "detach" or any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in p.tags for p in _tensors(bsym))
        for index, out in enumerate(bsym.flat_proxy_outs):
            if isinstance(out, TensorProxy):
                look = Look(bsym, index, certain, detached)
                self.place(out.name, self.root.get(base, base), (*self.path.get(base, ()), look))
        return True

    def place(self, name: str, root: str, path: Path) -> None:
        """Register a value made from the newest version of its memory."""
        self.root[name], self.path[name] = root, path
        self.seen[name] = self.memory[root].version if root in self.memory else 0

    def replay(self, look: Look, base: str) -> str:
        """Apply one view of a chain to another base; return the name of its result."""
        walk = self.walk
        operand = next(p for p in look.bsym.flat_proxy_args if isinstance(p, TensorProxy))
        held = walk.names.get(operand.name)
        walk.names[operand.name] = base
        with tracectx(TraceCtx(None)):
            proxies = {variableify(p): proxy_of(walk.fresh(p.name), type_of(p)) for p in _made(look.bsym)}
        for old, new in proxies.items():
            new.tags.update(old.proxy.tags)
        out = proxies[variableify(look.bsym.flat_proxy_outs[look.index])].name
        pending = [look.bsym.from_bsym_swap_proxies(proxies)]
        while pending:
            pending[:0] = walk.process(pending.pop(0))
        if held is None:
            del walk.names[operand.name]
        else:
            walk.names[operand.name] = held
        self.place(out, self.root.get(base, base), (*self.path.get(base, ()), look))
        return out

    # writes

    def process(self, bsym: BoundSymbol) -> list[BoundSymbol]:
        """Add the ops of `update_aliases` or `copy_`; return the subsymbols of anything else that writes."""
        if bsym.sym.id is prims.PrimIDs.UPDATE_ALIASES:
            for old, new in zip(bsym.args[0], bsym.output, strict=True):
                self.walk.names[new.name] = self.walk.name(old)
            return []
        if bsym.sym.id is prims.PrimIDs.COPY_:
            self.write(bsym)
            return []
        if not bsym.subsymbols or (rule_of(bsym)[0] is not None and not is_library_symbol(bsym)):
            self.keep_whole(bsym)
            return []
        if not _is_inplace(bsym):  # as batch norm, which updates its statistics: no gradient goes through that
            self.effects.update(_copied(bsym))
        return list(bsym.subsymbols)

    def keep_whole(self, bsym: BoundSymbol) -> None:
        """Add a symbol with a gradient rule of its own, a custom autograd.Function, that writes to what it makes."""
        rule, shareable = rule_of(bsym)
        template = self.walk.template(bsym, rule if self.walk.is_differentiable(bsym) else None, shareable)
        given = set(template.inputs)
        for op in template.forward:
            if not given.isdisjoint(op.writes) and op.target.name.endswith("copy_"):
                raise UnsupportedError(f"{_where(bsym)} writes in place to what it is given, in a function with a "
                                       "gradient of its own; write to a clone")
            if op.tags & {Tag.VIEW, Tag.MUTATES} and not given.isdisjoint(op.ins):
                given.update(op.outs)
        self.walk.instantiate(bsym, template)

    def write(self, bsym: BoundSymbol) -> None:
        """Add a `copy_`; its result is the value that what it writes to has from now on."""
        target = self.walk.name(bsym.args[1])
        root, path = self.root.get(target, target), self.path.get(target, ())
        memory = self.memory.setdefault(root, Memory(root))
        hidden = self.is_hidden(bsym)
        own = max((i + 1 for i, look in enumerate(path) if look.detached), default=0)
        apart = None  # the detached alias that is written to through a view of it, where it has a gradient
        if 0 < own < len(path) and (path[:own] in memory.apart or self.walk.name(bsym.args[0]) in self.walk.needs):
            apart = self.newest_at(memory, path[:own])
            self.read(bsym.flat_proxy_args)
        if memory.pending is not None and memory.pending.path != path:
            self.newest_whole(memory)
        self.copy(bsym, hidden)
        memory.has_history |= not (hidden or own)
        shown = bsym.output.name
        self.show(memory, shown, root, path)
        if apart is not None:
            shown, path = self.refresh(apart, Write(shown, path[own:], bsym, hidden)), path[:own]
            self.show(memory, shown, root, path)
        if own and shown in self.walk.needs:
            memory.apart[path] = shown
        if path:
            memory.pending = Write(shown, path, bsym, hidden or own > 0)
            if all(look.certain for look in path):
                self.newest_whole(memory)
        else:
            memory.whole, memory.pending = shown, None

    def show(self, memory: Memory, name: str, root: str, path: Path) -> None:
        """Let `name` be what a chain of views shows after a write; nothing else is known to be new."""
        memory.version += 1
        memory.current = {path: name}
        self.place(name, root, path)

    def copy(self, bsym: BoundSymbol, hidden: bool) -> None:
        """Add a `copy_` with its gradient: to the value that is written, or to what was there if autograd sees none."""
        walk = self.walk
        # thunder would refuse at run time what is no leaf, but looks like one where gradients are off
        unchecked = bsym.from_bsym(kwargs={**bsym.kwargs, "grad_enabled": False})
        walk.instantiate(unchecked, walk.template(unchecked, None, True))
        out, value, target = bsym.output.name, walk.name(bsym.args[0]), walk.name(bsym.args[1])
        if value in walk.needs and not hidden and walk.is_float(out):
            self.link(out, value)
        if target in walk.needs and hidden:
            self.link(out, target)
        elif target in walk.needs:
            walk.needs.add(out)
            walk.backward.append([Rest(out, target)])

    def link(self, name: str, source: str) -> None:
        """Let the cotangent of one value go to another one as it is."""
        grad = f"cotangent of {name}"
        self.walk.needs.add(name)
        self.walk.backward.append([Get(name, grad), Put(source, grad)])

    def is_hidden(self, bsym: BoundSymbol) -> bool:
        """Whether autograd does not see a write."""
        enabled = bsym.kwargs.get("grad_enabled", bsym.args[2] if len(bsym.args) > 2 else True)
        return not enabled or bsym.output.name in self.effects

    def written_arguments(self) -> tuple[str, ...]:
        """Return the arguments whose memory was written to."""
        return tuple(root for root, memory in self.memory.items() if root in self.walk.arguments and memory.version)

    def histories(self) -> dict[str, str]:
        """Return what the written arguments hold in the end, by argument, where that has a gradient."""
        written = {name: self.memory[name] for name in self.written_arguments()}
        newest = {name: self.newest_whole(memory) for name, memory in written.items() if memory.has_history}
        return {argument: name for argument, name in newest.items() if name in self.walk.needs}

    def refresh(self, before: str, write: Write) -> str:
        """Add the new version of the tensor `before`, a part of which was replaced; return its name."""
        walk = self.walk
        new, source = walk.fresh(before), source_of(write.bsym)
        walk.types[new] = walk.types[before]
        tags = frozenset({Tag.MUTATES, Tag.VIEW})
        op = own_op(f"refresh_{new}", _refresh(write), (Var(before), Var(write.name)), new, tags)
        walk.ops.append(op.replace(writes=(before,), source=source))
        self.place(new, self.root.get(before, before), ())
        if before in walk.needs or write.name in walk.needs:
            walk.needs.add(new)
            walk.backward.append(self._backward(new, before, write))
        return new

    def _backward(self, new: str, before: str, write: Write) -> list[Any]:
        walk, grad = self.walk, f"cotangent of {new}"
        if write.detached:
            return [Get(new, grad), Put(before, grad)]
        whole, kind = walk.types[before], walk.types[write.name]
        if not isinstance(kind, TensorType) or not isinstance(whole, TensorType) or kind.dtype != whole.dtype:
            raise UnsupportedError(f"{_where(write.bsym)} writes in place through a view of another dtype; write to a "
                                   "clone of it")
        look, part = _look_through(write.path, walk.executors), walk.fresh(f"d_{write.name}")
        walk.types[part] = kind
        through = own_op(f"view_through_{write.name}", look, (Var(grad),), part, frozenset()).replace(phase=Phase.BW)
        steps: list[Any] = [Get(new, grad), through, Put(write.name, part)]
        if math.prod(map(int, kind.shape)) == math.prod(map(int, whole.shape)):
            return steps
        rest = walk.fresh(f"d_{before}")
        walk.types[rest] = whole
        zeroed = own_op(f"zero_through_{write.name}", lambda g: zero_through(g, look), (Var(grad),), rest, frozenset())
        return [*steps, zeroed.replace(phase=Phase.BW), Put(before, rest)]


def zero_through(grad: torch.Tensor, look: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return `grad` with zeros where the view `look` looks; same shape and dtype."""
    positions = look(torch.arange(grad.numel(), device=grad.device).view(grad.shape)).reshape(-1)
    return grad.reshape(-1).index_fill(0, positions, 0).view(grad.shape)


def _look_through(path: Path, executors: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a chain of views as one function of a tensor."""
    programs = []
    for look in path:
        trace = TraceCtx(None)
        trace.names = set(names_in(look.bsym))
        with tracectx(trace):
            ops = Claims(executors, trace).claim(look.bsym)
        programs.append((ops, look.bsym.flat_proxy_args[0].name, look.bsym.flat_proxy_outs[look.index].name))

    def run(tensor: torch.Tensor) -> torch.Tensor:
        for ops, operand, result in programs:
            tensor = run_ops(ops, {operand: tensor}, Var(result))
        return tensor

    return run


def _refresh(write: Write) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    looks = [f"{look.bsym.sym.name} ({where(look.bsym)})" for look in write.path if not look.certain]
    message = (f"{_where(write.bsym)} writes in place to a result of {' and '.join(looks)}, which is a copy for these "
               "strides, and the tensor it was made from is read later as if it were a view; write to that tensor")

    def refresh(before: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        if looks and before.untyped_storage().data_ptr() != written.untyped_storage().data_ptr():
            raise UnsupportedError(message)
        return before

    return refresh


def _where(bsym: BoundSymbol) -> str:
    return f"the operation at {where(bsym)}" if where(bsym) else bsym.sym.name


def own_op(name: str, fn: Callable[..., Any], args: tuple[Any, ...], out: str | None, tags: frozenset[Tag]) -> Op:
    """Return an op of ours that runs `fn`; a name stands for one function in a trace and in the code made of it."""
    symbol = Symbol(name, meta=None, id=f"jointtrace.{name}")
    payload = BoundSymbol(symbol, (), {}, None, _call_ctx={name: fn})
    return Op(Target(f"jointtrace.{name}", fn), args, out=None if out is None else Var(out), tags=tags, payload=payload)


def _copied(bsym: BoundSymbol) -> Iterator[str]:
    if bsym.sym.id is prims.PrimIDs.COPY_:
        yield bsym.output.name
    for sub in bsym.subsymbols:
        yield from _copied(sub)


def _made(bsym: BoundSymbol) -> list[TensorProxy]:
    """Return the proxies that a symbol and its subsymbols make, each once."""
    made = {p.name: p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)}
    for sub in bsym.subsymbols:
        made.update((p.name, p) for p in _made(sub))
    given = {p.name for p in bsym.flat_proxy_args}
    return [p for name, p in made.items() if name not in given]


def _tensors(bsym: BoundSymbol) -> list[TensorProxy]:
    return [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]


def _may_copy(bsym: BoundSymbol) -> bool:
    symbol = bsym.sym
    unknown = symbol.id is prims.PrimIDs.RESHAPE or prims.OpTags.AUTO_REGISTERED in (symbol.tags or ())
    return unknown or symbol in ltorch._syms_that_may_return_views or any(map(_may_copy, bsym.subsymbols))


def _is_inplace(bsym: BoundSymbol) -> bool:
    return prims.OpTags.IN_PLACE in (bsym.sym.tags or ()) or bsym.subsymbols[-1].sym.id is prims.PrimIDs.COPY_


def writes(bsym: BoundSymbol) -> bool:
    """Whether a symbol or one of its subsymbols writes in place."""
    return bsym.sym.id in (prims.PrimIDs.COPY_, prims.PrimIDs.UPDATE_ALIASES) or any(map(writes, bsym.subsymbols))
