"""sizes: what a region must be given to know the sizes it uses. Holds for torch 2.10 to 2.14: `free_symbols`."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_symbols

from jointtrace.ir.op import Op, ScalarType, Symbol, TensorType, Var
from jointtrace.ir.trace import Trace


def bind_sizes(trace: Trace) -> Trace:
    """Return `trace` with each unknown size among the arguments of the regions that use it.

    A region may be given tensors of which no size is the symbol itself (`2*s0`); compiled code must find it somewhere.
    """
    if not any(isinstance(size, Symbol) for type_ in trace.types.values() if isinstance(type_, TensorType)
               for size in (*type_.shape, *(type_.strides or ()))):
        return trace
    payloads = [inner.payload for op in trace.ops for inner in (op.body.ops if op.body else (op,))]
    values = {node.name: node.meta.get("val") for node in payloads[0].graph.nodes}
    known = {values[name].node.expr: name for name in trace.inputs if isinstance(values[name], torch.SymInt)}
    ops = []
    for op in trace.ops:
        ops.append(_with_sizes(op, values, known) if op.body is not None else op)
        known = {**{values[n].node.expr: n for n in op.outs if isinstance(values[n], torch.SymInt)}, **known}
    return trace.rebuild(ops, by=trace.by)


def _with_sizes(region: Op, values: Mapping[str, Any], known: Mapping[Any, str]) -> Op:
    body = region.body
    assert body is not None
    symbols = {symbol for name in body.types for symbol in free_symbols(values[name])}
    names = [known[symbol] for symbol in sorted(symbols, key=str) if symbol in known]
    missing = tuple(name for name in names if name not in body.types)
    types = {**body.types, **dict.fromkeys(missing, ScalarType("int"))}
    return region.replace(args=(*map(Var, missing), *region.args),
                          body=replace(body, inputs=(*missing, *body.inputs), types=types))
