"""Forward values that the backward reads after the forward has overwritten them.

As a function, an in-place operation leaves the old value as it was; in memory it is gone. So the forward copies the old
value before it is overwritten. Eager PyTorch keeps such a copy for some operations (as `y.mul_(x)`), or else raises.
What was overwritten as a whole has a gradient of zeros: `spread` says whose cotangents those stand for.
"""
from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

from jointtrace.ir.facts import storage
from jointtrace.ir.op import Op, Tag, Type, Var
from jointtrace.ir.trace import Trace
from jointtrace.joint.alias import own_op
from jointtrace.joint.expand import Get, Put, Rest


def keep_overwritten(trace: Trace) -> Trace:
    """Return `trace` with a copy, made in time, of each value that the backward reads after it was overwritten."""
    forward, backward = trace.ops[: trace.boundary], trace.ops[trace.boundary:]
    memory = storage(trace)
    written: dict[str, list[int]] = {}
    for position, op in enumerate(forward):
        for name in op.writes:
            written.setdefault(memory[name], []).append(position)
    if not written:
        return trace
    made = {name: position for position, op in enumerate(forward) for name in op.outs}
    copies: dict[int, list[Op]] = {}
    names: dict[str, str] = {}
    types: dict[str, Type] = {}
    for name in dict.fromkeys(n for op in backward if Tag.GET_GRAD not in op.tags for n in op.ins):
        known = name in made or name in trace.inputs
        later = [p for p in written.get(memory[name], ()) if p > made.get(name, -1)] if known else []
        if later:
            names[name] = f"{name}_before_write"
            types[names[name]] = trace.types[name]
            copy = own_op("copy_of", torch.clone, (Var(name),), names[name], frozenset())
            copies.setdefault(later[0], []).append(copy.replace(source=forward[later[0]].source))
    ops: list[Op] = []
    for position, op in enumerate(forward):
        ops += [*copies.get(position, ()), op]
    ops += [op if Tag.GET_GRAD in op.tags else op.rename_inputs(names) for op in backward]
    return trace.rebuild(ops, by=trace.by, types=types)


def spread(chunk: Sequence[Any], reached: dict[str, int], needs: Container[str]) -> None:
    """Note in `reached` that what reaches the results of one symbol reaches those of its operands that are in `needs`.

    Eager gives an operand a gradient of zeros, and not none, where a cotangent reaches it without giving it anything.
    """
    mask = 0
    for step in chunk:
        mask |= reached.get(step.of, 0) if isinstance(step, Get | Rest) else 0
    for step in chunk if mask else ():
        if isinstance(step, Put | Rest) and step.to in needs:
            reached[step.to] = reached.get(step.to, 0) | mask
