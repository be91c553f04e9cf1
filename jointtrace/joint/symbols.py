"""thunder's proxies, bound symbols and traces to our values, ops and traces, and back.

Holds for lightning-thunder 0.2.6. Facts about an op are derived from thunder's OpTags, over all its subsymbols.
"""
from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.codeutils import Positions
from thunder.core.proxies import (
    CollectionProxy,
    ComplexProxy,
    FloatProxy,
    FutureTensorProxy,
    IntegerProxy,
    NumberProxy,
    Proxy,
    TensorProxy,
)
from thunder.core.pytree import tree_flatten_with_dataclass, tree_map
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.distributed.prims import PrimIDs as DistributedIDs
from thunder.extend import TemporaryExecutor

from jointtrace.errors import UnsupportedError
from jointtrace.ir.op import ObjectType, Op, Phase, ScalarType, Source, Tag, Target, TensorType, Type, Var, map_leaves

NUMBER_PROXIES = {"int": IntegerProxy, "bool": IntegerProxy, "float": FloatProxy, "complex": ComplexProxy}
UNTAGGED_RANDOM = frozenset({prims.PrimIDs.RANDN, prims.PrimIDs.RANDINT})  # thunder tags other random prims
LINEAR = frozenset({prims.PrimIDs.ADD, prims.PrimIDs.SUB, prims.PrimIDs.NEG, prims.PrimIDs.CAT,
                    prims.PrimIDs.PAD, prims.PrimIDs.COPY_, prims.PrimIDs.CONVERT_ELEMENT_TYPE, prims.PrimIDs.WHERE})
RANDOM_IN_PYTHON = frozenset({  # torch functions without an operator of their name
    "dropout1d", "dropout2d", "dropout3d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices",
    "gumbel_softmax", "lobpcg", "multi_head_attention_forward"})
COMPUTE_BOUND = frozenset({prims.OpTags.MATMUL_OP, prims.OpTags.DONT_AUTO_RECOMPUTE_IN_BACKWARD,
                           prims.OpTags.DONT_RECOMPUTE_IN_BACKWARD})
if not hasattr(BoundSymbolTag, "IN_CHECKPOINT"):
    BoundSymbolTag.register_tag("IN_CHECKPOINT")
IN_CHECKPOINT: Any = BoundSymbolTag("IN_CHECKPOINT")  # of all symbols in a checkpoint; thunder leaves out the last ones
OWN_EXECUTORS = frozenset({"torch", "python", "jointtrace"})  # what these run is torch code that we may trace


def type_of(proxy: Proxy) -> Type:
    """Return the type of the value that `proxy` stands for."""
    if isinstance(proxy, (TensorProxy, FutureTensorProxy)):
        shape = tuple(int(s.value) if isinstance(s, NumberProxy) else int(s) for s in proxy._shape or ())
        return TensorType(shape, dtypes.to_torch_dtype(proxy.dtype), str(devices.to_torch_device(proxy.device)))
    if isinstance(proxy, NumberProxy):
        return ScalarType(proxy.python_type.__name__)
    return ObjectType(type(proxy).__name__)


def proxy_of(name: str, kind: Type) -> Proxy:
    """Return a new proxy called `name`, registered in the current thunder trace."""
    if isinstance(kind, TensorType):
        return TensorProxy(name, shape=tuple(int(s) for s in kind.shape), device=devices.to_device(kind.device),
                           dtype=dtypes.to_dtype(kind.dtype), requires_grad=False)
    if isinstance(kind, ScalarType):
        return NUMBER_PROXIES[kind.kind](name, value=None)
    return CollectionProxy([], name=name)


def to_vars(tree: Any) -> Any:
    """Return an argument tree with `Var` for every proxy."""
    return map_leaves(lambda leaf: Var(leaf.name) if isinstance(leaf, Proxy) else leaf, tree)


def out_vars(tree: Any) -> Any:
    """Return an output tree with `Var` for every proxy and None for anything else."""
    return map_leaves(lambda leaf: Var(leaf.name) if isinstance(leaf, Proxy) else None, tree)


def where(bsym: BoundSymbol) -> str:
    """Return "file:line" of the user's code that a bound symbol comes from, or an empty string."""
    position = bsym.source_positions
    if bsym.source_filename is None or position is None or position.lineno is None:
        return ""
    return f"{bsym.source_filename}:{position.lineno}"


def source_of(bsym: BoundSymbol) -> Source | None:
    """Return the source of a bound symbol; the file without its folder, so that dumps are the same everywhere."""
    position = bsym.source_positions
    if bsym.source_filename is None or position is None or position.lineno is None:
        return None
    return Source(os.path.basename(bsym.source_filename), position.lineno, path=bsym.source_filename)


def callable_of(bsym: BoundSymbol) -> Callable[..., Any]:
    """Return the Python callable that runs a claimed bound symbol."""
    symbol = bsym.sym
    if bsym._call_ctx is not None and symbol.name in bsym._call_ctx:
        return bsym._call_ctx[symbol.name]
    if symbol.python_impl is not None:
        return symbol.python_impl
    fn: Any = symbol.module
    for part in symbol.name.removeprefix("torch.").split("."):  # torchex names some after where they are in torch
        fn = getattr(fn, part, None)
    if fn is None or isinstance(fn, Symbol):
        raise UnsupportedError(f"no executor runs {symbol.name} ({where(bsym) or 'no source known'}); add an executor "
                               "that implements it to thunder.jit(executors=...)")
    return fn


def target_name(bsym: BoundSymbol) -> str:
    """Return the printed name of a claimed symbol, such as `torch.mul` or `torch.nn.functional.linear`."""
    symbol = bsym.sym
    if isinstance(symbol.executor, TemporaryExecutor):
        return f"opaque.{symbol.name.rsplit('_', 2)[0]}"  # thunder appends an id, which differs from run to run
    module = symbol._module
    if module is not None and symbol.python_impl is None:
        return f"{getattr(module, '__qualname__', None) or module.__name__}.{symbol.name}"
    owner = symbol.executor.name if symbol.executor is not None else "prims"
    return f"{owner}.{symbol.name}"


def names_in(bsym: BoundSymbol) -> Iterable[str]:
    """Yield the names of all values that a bound symbol and its subsymbols read or make."""
    yield from (proxy.name for proxy in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs))
    for sub in bsym.subsymbols:
        yield from names_in(sub)


def _symbols(bsym: BoundSymbol) -> Iterable[Symbol]:
    yield bsym.sym
    for sub in bsym.subsymbols:
        yield from _symbols(sub)


def _leaf_symbols(bsym: BoundSymbol) -> Iterable[Symbol]:
    if not bsym.subsymbols:
        yield bsym.sym
    for sub in bsym.subsymbols:
        yield from _leaf_symbols(sub)


def is_view(bsym: BoundSymbol) -> bool:
    """Whether all that a symbol does is to look at a tensor in another shape."""
    return all(map(_is_look, _leaf_symbols(bsym)))


def may_be_view(bsym: BoundSymbol) -> bool:
    """Whether a symbol that `is_view` does not know as a view may return one: by thunder's list, or by the strides."""
    known = bsym.sym in ltorch._syms_returning_views and bsym.sym != ltorch.getitem  # indexing by a tensor copies
    return known or all(s.id is prims.PrimIDs.STRIDE_ORDER or _is_look(s) for s in _leaf_symbols(bsym))


def _is_look(symbol: Symbol) -> bool:
    if symbol.id in (prims.PrimIDs.STRIDE_ORDER, prims.PrimIDs.BITCAST):
        return symbol.id is prims.PrimIDs.BITCAST
    tags = symbol.tags or ()
    if prims.OpTags.AUTO_REGISTERED not in tags:
        return prims.OpTags.SHAPE_OP in tags
    aliases = [result.alias_info for overload in _overloads(str(symbol.id)) for result in overload._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@functools.cache
def _overloads(name: str) -> tuple[Any, ...]:
    """Return the operators behind a torch function, such as `torch.narrow` or `torch.linalg.inv`; none if unknown."""
    module, _, function = name.rpartition(".")
    family = module.rpartition(".")[2]
    packet = getattr(torch.ops.aten, f"{family}_{function}", None) or getattr(torch.ops.aten, function, None)
    return tuple(getattr(packet, overload) for overload in packet.overloads()) if packet else ()


def tags_of(bsym: BoundSymbol) -> frozenset[Tag]:
    """Return what thunder knows of a symbol before executors claim it, as our tags."""
    symbols = list(_symbols(bsym))
    known = {tag for symbol in symbols for tag in symbol.tags or ()}
    tags = set()
    if prims.OpTags.RANDOM_OP in known or any(map(may_be_random, symbols)):
        tags.add(Tag.RANDOM)
    if known & COMPUTE_BOUND:
        tags.add(Tag.COMPUTE_BOUND)
    if BoundSymbolTag.RECOMPUTE_IN_BACKWARD in bsym.tags:
        tags.add(Tag.RECOMPUTE)
    if any(symbol.id in (prims.PrimIDs.COPY_, prims.PrimIDs.UPDATE_ALIASES) for symbol in symbols):
        tags.add(Tag.MUTATES)
    elif known & {prims.OpTags.DONT_DCE, prims.OpTags.IN_PLACE}:
        tags.add(Tag.OPAQUE)
    if any(isinstance(symbol.id, DistributedIDs) for symbol in symbols):
        tags.add(Tag.COLLECTIVE)
        if any(symbol.id is DistributedIDs.WAIT for symbol in symbols):
            tags.add(Tag.WAIT)
    if is_view(bsym) and not tags & {Tag.MUTATES, Tag.OPAQUE}:
        tags.add(Tag.VIEW)
    return frozenset(tags)


def may_be_random(symbol: Symbol) -> bool:
    """Whether a symbol draws random numbers, as far as its own tags do not tell; doubt counts as yes."""
    if symbol.id in UNTAGGED_RANDOM:
        return True
    return prims.OpTags.AUTO_REGISTERED in (symbol.tags or ()) and (
        draws_again(symbol) or not _overloads(str(symbol.id)))


def draws_again(symbol: Symbol) -> bool:
    """Whether a symbol's gradient, which is torch's for the function run once more, would draw other random numbers."""
    if prims.OpTags.AUTO_REGISTERED not in (symbol.tags or ()):
        return False
    seeded = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in _overloads(str(symbol.id)))
    return seeded or symbol.name in RANDOM_IN_PYTHON


def right_for_complex(symbol: Symbol) -> bool:
    """Whether a symbol's gradient rule holds for complex numbers: torch's own, a linear map with real factors, ours."""
    tags = symbol.tags or ()
    known = prims.OpTags.AUTO_REGISTERED in tags or prims.OpTags.SHAPE_OP in tags
    return bool(known or symbol.id in LINEAR or symbol.id is prims.PrimIDs.MUL or symbol == ltorch.clone)


def written(bsym: BoundSymbol) -> tuple[str, ...]:
    """Return the names of the values that a claimed symbol writes to."""
    if bsym.sym.name == "copy_":
        return (bsym.args[1].name,)
    if bsym.sym.name == "update_aliases":
        return tuple(p.name for p in bsym.flat_proxy_args)
    return tuple(dict.fromkeys(p.name for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)))


def to_op(bsym: BoundSymbol, tags: frozenset[Tag], source: Source | None, phase: Phase = Phase.FW) -> Op:
    """Return a claimed bound symbol as an op; `tags` are those of the symbol it was claimed from."""
    executor, fn = bsym.sym.executor, callable_of(bsym)
    foreign = executor is not None and executor.name not in OWN_EXECUTORS
    if foreign or getattr(fn, "runs_autograd", getattr(fn, "func", None) is ltorch._vjp_impl):
        tags |= {Tag.CLAIMED, Tag.COMPUTE_BOUND}
    return Op(
        Target(target_name(bsym), fn), to_vars(bsym.args), to_vars(bsym.kwargs), out_vars(bsym.output),
        tags, phase, writes=written(bsym) if Tag.MUTATES in tags else (), source=source, payload=bsym,
    )


def types_of(bsym: BoundSymbol) -> dict[str, Type]:
    """Return the types of the values that a bound symbol makes."""
    return {proxy.name: type_of(proxy) for proxy in bsym.flat_proxy_outs}


class ProxyTable:
    """The proxies of one thunder trace by name, made on demand from our types."""

    def __init__(self, types: Mapping[str, Type], known: Mapping[str, Proxy] | None = None) -> None:
        self.types = types
        self.proxies: dict[str, Any] = dict(known or {})

    def __getitem__(self, name: str) -> Proxy:
        if name not in self.proxies:
            self.proxies[name] = proxy_of(name, self.types[name])
        return self.proxies[name]

    def tree(self, tree: Any) -> Any:
        """Return an argument tree with a proxy for every `Var`."""
        return map_leaves(lambda leaf: self[leaf.name] if isinstance(leaf, Var) else leaf, tree)


def to_bound_symbol(op: Op, table: ProxyTable, *, fused: bool = False) -> BoundSymbol:
    """Return `op` as a bound symbol: its own payload with new arguments, or a fusion for a region."""
    tags = {BoundSymbolTag.BACKWARD} if op.phase is Phase.BW else set()
    args, kwargs, output = table.tree(op.args), table.tree(dict(op.kwargs)), table.tree(op.out)
    if op.body is not None:
        inner = ProxyTable({**table.types, **op.body.types}, table.proxies)
        parts = [to_bound_symbol(part, inner, fused=True) for part in op.body.ops]
        symbol = Symbol(op.target.name, meta=_meta_of(output), is_fusion=True)
        return BoundSymbol(symbol, args, kwargs, output, parts, tags=tags, _call_ctx={op.target.name: op.target.fn})
    if Tag.GET_GRAD in op.tags:
        return BoundSymbol(prims.get_grad, args[:1], {}, output, tags=tags)
    payload: BoundSymbol | None = op.payload
    where = {} if op.source is None else {
        "source_filename": op.source.path, "source_positions": Positions(op.source.line, op.source.line, 0, 999)}
    claimed = payload and (payload._call_ctx is not None or payload.sym.executor or payload.sym.python_impl)
    if payload is None or not (claimed or fused):  # added by a pass, or kept whole for a fusion that did not come about
        name = f"{payload.sym.name if payload else op.target.name.replace('.', '_')}_{op.outs[0]}"
        symbol = Symbol(name, meta=_meta_of(output))
        return BoundSymbol(symbol, args, kwargs, output, tags=tags, _call_ctx={name: op.target.fn}, **where)
    symbol = payload.sym if payload.sym.meta is not None else replace(payload.sym, meta=_meta_of(output))
    return payload.from_bsym(sym=symbol, args=args, kwargs=kwargs, output=output, subsymbols=(), tags=tags, **where)


def _meta_of(output: Any) -> Callable[..., Any]:
    """Return what thunder's checks of a trace call in place of a symbol: it makes new proxies like `output`."""

    def meta(*args: Any, **kwargs: Any) -> Any:
        return map_leaves(lambda leaf: TensorProxy(like=leaf) if isinstance(leaf, TensorProxy) else leaf, output)

    return meta


def swap_tree(tree: Any, names: Mapping[str, Proxy]) -> Any:
    """Return a thunder pytree with proxies replaced by name."""
    return tree_map(lambda leaf: names.get(leaf.name, leaf) if isinstance(leaf, Proxy) else leaf, tree)


def flat_proxies(tree: Any) -> list[Any]:
    """Return the leaves of a thunder pytree, dataclasses opened."""
    return tree_flatten_with_dataclass(tree)[0]
