"""Faults to plant in passes, and the two front ends to find them through."""
from __future__ import annotations

import thunder
import torch

import jointtrace  # noqa: F401  names the backend
from jointtrace import pipeline
from jointtrace.ir.op import Var


def compiled_by(frontend, fn, *executors, check=True):
    """Compile `fn`, in check mode."""
    options = {"executors": executors or ("eager",), "check": "eager" if check else None}
    if frontend == "thunder":
        return thunder.jit(fn, delay_trace_split=True, jointtrace=options)
    torch._dynamo.reset()
    return torch.compile(fn, backend="jointtrace", options=options)


def plant(monkeypatch, name, change, occurrence=0):
    """Change what the pass `name` returns: `change(before, after)` is the trace that comes out."""
    found = [i for i, (known, _) in enumerate(pipeline.PASSES) if known == name][occurrence]
    step = pipeline.PASSES[found][1]
    passes = list(pipeline.PASSES)
    passes[found] = (name, lambda trace, *rest: change(trace, step(trace, *rest)))
    monkeypatch.setattr(pipeline, "PASSES", tuple(passes))


def names_of(trace, wanted):
    """Return what the ops make for which `wanted` holds."""
    return [name for op in trace.ops if wanted(op) for name in op.outs]


def renamed(trace, names, where):
    """Return `trace` reading `names[n]` for `n` in the ops for which `where` holds, and in its results."""
    def swap(leaf):
        return Var(names.get(leaf.name, leaf.name)) if isinstance(leaf, Var) else leaf

    ops = [op.rename_inputs(names) if where(op) else op for op in trace.ops]
    return trace.rebuild(ops, by=trace.by, grads=tuple(map(swap, trace.grads)))
