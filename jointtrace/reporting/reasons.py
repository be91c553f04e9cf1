"""reasons: who in the backward needs a kept value, and why that value is not computed again."""
from __future__ import annotations

from collections.abc import Callable

from jointtrace.ir.facts import SHARING
from jointtrace.ir.trace import Trace
from jointtrace.passes.recompute import cost_of_recompute, why_kept
from jointtrace.pipeline import in_loops
from jointtrace.runtime.record import Record

KIB, MIB, GIB = 2**10, 2**20, 2**30


def size(nbytes: int) -> str:
    """Return a number of bytes for people."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    if nbytes >= MIB / 10:
        return f"{nbytes / MIB:.2f} MiB"
    return f"{nbytes / KIB:.1f} KiB" if nbytes >= KIB else f"{nbytes} B"


def readers_of(backward: Trace | None) -> dict[str, list[str]]:
    """Return for each input of the backward the ops that read it or a view of it, with the user's lines."""
    readers: dict[str, list[str]] = {}
    base: dict[str, str] = {}
    if backward is None:
        return readers
    for op in backward.ops:
        for inner in op.body.ops if op.body is not None else (op,):
            read = dict.fromkeys(base.get(name, name) for name in inner.ins)
            if inner.tags & SHARING and read:
                base.update(dict.fromkeys(inner.outs, next(iter(read))))
                continue
            again = " (computed again)" if inner.source is not None and not inner.source.op else ""
            text = inner.target.name + again + (f" at {inner.source}" if inner.source else "")
            for name in read:
                readers.setdefault(name, []).append(text)
    return readers


def reasons_for(record: Record) -> Callable[[str], str]:
    """Return what says of a value that a compilation keeps why it is not computed again."""
    stages = {stage.name: stage.trace for stage in reversed(record.stages)}  # of two of one name the first
    if "recompute" not in stages:
        return lambda _: "the pass `recompute` is switched off, so all that the backward reads is kept"
    names = [stage.name for stage in record.stages]
    given, made = record.stages[names.index("recompute") - 1].trace, stages["recompute"]
    executors = () if "fuse" in record.options.disable else record.executors
    fused, budget, policy = in_loops(given, executors), record.options.memory_budget, record.options.policy
    why = why_kept(given, fused=fused, budget=budget, policy=policy)
    forward = {name for op in given.ops[: given.boundary] for name in op.outs}
    again = {name for name in forward if f"bw_{name}" in made.types and f"bw_{name}" not in given.types}
    cost = cost_of_recompute(given, again, fused=fused, budget=budget, policy=policy)

    def reason(name: str) -> str:
        if name in why:
            return f"it cannot be computed again: {why[name]}"
        if name not in cost:
            return "it came with the split of the program"
        if cost[name] <= 0 and budget is not None:
            return f"the plan within memory_budget={budget} keeps it"
        return f"keeping it costs less, by {size(max(cost[name], 0))} of memory traffic"

    return reason
