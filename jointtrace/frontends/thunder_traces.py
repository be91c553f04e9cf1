"""Our traces as thunder traces: what thunder runs, prints and hands to the user's transforms.

Holds for lightning-thunder 0.2.6. The names `C0`, `C1`, `saved_for_backward` and `cotangents` are thunder's own.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from thunder.core import prims
from thunder.core.codeutils import prettyprint
from thunder.core.proxies import CollectionProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, TraceTag, from_trace, tracectx

from jointtrace.errors import UnsupportedError
from jointtrace.ir.op import TensorType, Var
from jointtrace.ir.trace import Trace
from jointtrace.joint.build import Joint, Written
from jointtrace.joint.places import place_of
from jointtrace.joint.symbols import ProxyTable, flat_proxies, swap_tree, to_bound_symbol
from jointtrace.runtime.split import Halves

ALIASES_LEFT = "skip_inplace_alias_updates"  # thunder's option: then its cache does not tell which arguments are one


class StageTrace(TraceCtx):
    """One stage of the joint trace, converted when somebody looks at it."""

    def __init__(self, computation: TraceCtx, stage: str, build: Callable[[TraceCtx], list[BoundSymbol]]) -> None:
        self._build: Callable[[TraceCtx], list[BoundSymbol]] | None = None
        super().__init__(computation.fn)
        self.args, self.kwargs = computation.args, computation.kwargs
        self._siginfo = computation._siginfo
        self._build = build
        self.set_provenance(TraceProvenance(f"jointtrace: {stage}"))

    @property
    def bound_symbols(self) -> list[Any]:
        """The symbols of this stage."""
        if self._build is not None:
            build, self._build = self._build, None
            self.bound_symbols = build(self)
        return self._bound_symbols

    @bound_symbols.setter
    def bound_symbols(self, bsyms: list[Any]) -> None:
        self._bound_symbols = bsyms
        self.scopes[0] = bsyms


def stage_trace(computation: TraceCtx, stage: str, trace: Trace, names: Mapping[str, str]) -> TraceCtx:
    """Return a stage of the joint trace as a thunder trace; its return lists gradients, inputs and forward outputs."""

    def build(target: TraceCtx) -> list[BoundSymbol]:
        table = _table(computation, trace)
        unpacked, body = _unpacked(computation, target), _body(trace, table, target)
        result = _result(computation, table, names)
        returned = {"output": _optional(table, trace.grads), "flat_args": _inputs(computation),
                    "fw_flat_out": result["output"]} if trace.grads else result
        return [*unpacked, *body, _return(returned)]

    return StageTrace(computation, stage, build)


def half_stage_trace(stage: str, trace: Trace) -> TraceCtx:
    """Return an intermediate stage of one half as a thunder trace that takes its inputs one by one."""
    names, formal = trace.inputs, TraceCtx(None)
    table = ProxyTable(trace.types)
    with tracectx(formal):
        formal.args = tuple(table[name] for name in names)
    formal.names = set(names)
    formal._siginfo = _siginfo(stage, names)

    def build(target: TraceCtx) -> list[BoundSymbol]:
        return [*_unpacked(formal, target), *_body(trace, table, target), _return(_optional(table, trace.outputs))]

    return StageTrace(formal, stage, build)


def forward_trace(computation: TraceCtx, halves: Halves, joint: Joint) -> TraceCtx:
    """Return the forward half in the form that thunder compiles: ({output, flat_args, flat_output}, saved)."""
    trace = halves.forward
    target = TraceCtx(computation.fn)
    target.args, target.kwargs, target._siginfo = computation.args, computation.kwargs, computation._siginfo
    table = _table(computation, trace)
    unpacked = _unpacked(computation, target)
    bsyms = [*unpacked, *_checks(unpacked, joint.written), *_body(trace, table, target)]
    returned = _result(computation, table, joint.names)
    if computation_has_gradients(halves):
        target.tags.add(TraceTag.AUGMENTED_FORWARD)
        more = joint.trace.outputs[len(flat_proxies(returned["output"])):]
        returned["flat_output"] = (*flat_proxies(returned["output"]), *_optional(table, more))
        tensors, others = saved_proxies(halves, table)
        target.bound_symbols = [*bsyms, _return(returned, (tuple(tensors), tuple(others)))]
    else:
        target.bound_symbols = [*bsyms, _return(returned)]
    target.set_provenance(TraceProvenance("jointtrace: forward"))
    return target


def _checks(unpacked: Sequence[BoundSymbol], written: Written) -> list[BoundSymbol]:
    """Return the symbol that refuses a call in which an argument cannot be written to as it would be in eager."""
    if not (written.arguments or written.repeated):
        return []
    tensors = [bsym.output for bsym in unpacked if isinstance(bsym.output, TensorProxy)]
    symbol = Symbol("check_written", meta=lambda *_: None)
    check = _written_check([tensor.name for tensor in tensors], written)
    return [BoundSymbol(symbol, tuple(tensors), {}, None, _call_ctx={symbol.name: check})]


def _written_check(names: Sequence[str], written: Written) -> Callable[..., None]:
    def check_written(*given: torch.Tensor) -> None:
        owner: dict[int, str] = {}
        tensors = dict(zip(names, given, strict=True))
        for name, tensor in tensors.items():
            same = written.repeated.get(name)
            if same is not None:
                if place_of(tensor) != place_of(tensors[same]):
                    raise UnsupportedError(f"compiled where arguments {same} and {name} were one tensor, called where "
                                           f"they are two; pass a clone, and leave out {ALIASES_LEFT}")
                continue
            other = owner.setdefault(tensor.untyped_storage().data_ptr(), name)
            if other != name and (name in written.arguments or other in written.arguments):
                raise UnsupportedError(f"arguments {other} and {name} share memory, and the function writes in place "
                                       f"to {name if name in written.arguments else other}; pass a clone")
            if name in written.differentiable and (tensor._is_view() or (tensor.requires_grad and tensor.is_leaf)):
                kind = "view" if tensor._is_view() else "leaf that requires a gradient"
                raise UnsupportedError(f"the function writes in place to {name}, a {kind}, a value with a gradient; "
                                       "write to a clone of it, or under torch.no_grad()")

    return check_written


def computation_has_gradients(halves: Halves) -> bool:
    """Whether there is a backward half."""
    return halves.backward is not None


def saved_proxies(halves: Halves, table: ProxyTable) -> tuple[list[Proxy], list[Proxy]]:
    """Return the saved values as proxies: tensors (`C0`) and others (`C1`)."""
    tensors = [table[n] for n in halves.saved if isinstance(table.types[n], TensorType)]
    others = [table[n] for n in halves.saved if not isinstance(table.types[n], TensorType)]
    return tensors, others


def backward_trace(halves: Halves, fn: Callable[..., Any]) -> TraceCtx:
    """Return the backward half in the form that thunder compiles: fn([C0, C1], cotangents) -> gradients.

    The second collection is not unpacked where nothing is in it. `fn` is what thunder calls the trace's function; it is
    reachable from the compiled code.
    """
    trace = halves.backward
    assert trace is not None
    target = TraceCtx(fn)
    target.tags.add(TraceTag.BACKWARD)
    table = ProxyTable(trace.types)
    with tracectx(target):
        tensors, others = saved_proxies(halves, table)
        cotangents = [None if name is None else table[name] for name in halves.cotangents]
        c0, c1 = CollectionProxy(tensors, name="C0"), CollectionProxy(others, name="C1")
        saved = CollectionProxy([c0, c1], name="saved_for_backward")
        given = CollectionProxy(cotangents, name="cotangents")
        target.args = ([c0.collection(), c1.collection()], given.collection())
        prims.unpack_trivial(saved, name="saved_for_backward")
        prims.unpack_trivial(given, name="cotangents")
        unpack = [saved, given, c0] + ([c1] if others else [])
        for collection in unpack:
            if collection is saved and not others:
                bsym = prims.unpack_sequence.bind(saved, 2, output=[c0, None])
                target.bound_symbols.append(bsym)
            elif collection.coll:
                prims.unpack_sequence(collection, len(collection.coll))
    body = _body(trace, table, target)
    target.bound_symbols = [*target.bound_symbols, *body, _return(_optional(table, trace.outputs))]
    target.set_provenance(TraceProvenance("jointtrace: backward"))
    return target


def _table(computation: TraceCtx, trace: Trace) -> ProxyTable:
    known = {p.name: p for p in flat_proxies((computation.args, computation.kwargs)) if isinstance(p, Proxy)}
    return ProxyTable(trace.types, known)


def _inputs(computation: TraceCtx) -> list[Any]:
    return list(flat_proxies((computation.args, computation.kwargs)))


def _unpacked(computation: TraceCtx, target: TraceCtx) -> list[BoundSymbol]:
    inputs = [p for p in _inputs(computation) if isinstance(p, Proxy)]
    target.names = {p.name for p in inputs}
    return [prims.unpack_trivial.bind(p, name=p.name, output=p) for p in inputs]


def _body(trace: Trace, table: ProxyTable, target: TraceCtx) -> list[BoundSymbol]:
    with tracectx(target):
        return [to_bound_symbol(op, table) for op in trace.ops]


def _result(computation: TraceCtx, table: ProxyTable, names: Mapping[str, str]) -> dict[str, Any]:
    output = computation.bound_symbols[-1].args[0]["output"]
    renamed = {p.name: table[names[p.name]] for p in flat_proxies(output) if isinstance(p, Proxy) and p.name in names}
    known = {p.name: table[p.name] for p in flat_proxies(output) if isinstance(p, Proxy) and p.name not in names}
    return {"output": swap_tree(output, {**known, **renamed}), "flat_args": _inputs(computation)}


def _optional(table: ProxyTable, values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(table[v.name] if isinstance(v, Var) else v for v in values)


def _return(*values: Any) -> BoundSymbol:
    return prims.python_return.bind(*values, output=None)


def _siginfo(name: str, args: tuple[str, ...]) -> Any:
    from thunder.core.codeutils import SigInfo

    info = SigInfo(name)
    info.args = [(arg, None) for arg in args]
    return info


def release_inputs(trace: TraceCtx) -> TraceCtx:
    """Return a half in which a region takes over the inputs it reads last, so that they are freed while it runs.

    thunder deletes a value after the symbol that reads it last; the caller's names would keep the values until then.
    """
    released = from_trace(trace)
    released.set_provenance(trace.get_provenance())
    bsyms: list[Any] = []
    for bsym in trace.bound_symbols:
        region = bsyms[-1] if bsyms else None
        if bsym.sym.id is not prims.PrimIDs.DEL or region is None or not _takes_a_list(region):
            bsyms.append(bsym)
            continue
        read = {p.name for p in region.flat_proxy_args}
        taken = [p.name for p in bsym.flat_proxy_args if p.name in read]
        kept = [p for p in bsym.flat_proxy_args if p.name not in read]
        bsyms[-1] = region.from_bsym(sym=replace(region.sym, python_printer=partial(_print_boxed, taken)))
        if kept:
            bsyms.append(prims.python_del.bind(*kept, output=None))
    released.bound_symbols = bsyms
    return released


def _takes_a_list(bsym: Any) -> bool:
    return bsym.sym.is_fusion and hasattr((bsym._call_ctx or {}).get(bsym.sym.name), "boxed")


def _print_boxed(taken: list[str], bsym: BoundSymbol, outs: Any, args: Any, kwargs: Any) -> list[str]:
    name = bsym.sym.name
    given = ", ".join(prettyprint(arg) for arg in args)
    results = f"{prettyprint(outs, literals_as_underscores=True)} = " if bsym.flat_proxy_outs else ""
    return [f"{name}_args = [{given}]", *([f"del {', '.join(taken)}"] if taken else []),
            f"{results}{name}.boxed({name}_args)"]
