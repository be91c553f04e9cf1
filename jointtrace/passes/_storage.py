"""Which values may share memory, and which memory an op writes to, where a pass must not be wrong.

`ir.facts.storage` says what shares memory as far as tags tell. This is the cautious side of it.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping

from jointtrace.ir.facts import SHARING
from jointtrace.ir.op import Op, ScalarType, Tag
from jointtrace.ir.trace import Trace


def storages(trace: Trace) -> dict[str, str]:
    """Return for every value its storage: the name of one value that stands for all that may share memory with it.

    A view may share with any of its operands; what an OPAQUE op or one with a body returns may be what it was given.
    """
    parent = {name: name for name in trace.inputs}
    for op in trace.ops:
        parent.update((name, name) for name in op.outs)
        shares = op.tags & SHARING or Tag.OPAQUE in op.tags or op.body is not None
        operands = op.ins if shares else op.writes
        values = [name for name in (*operands, *op.outs) if not isinstance(trace.types.get(name), ScalarType)]
        for name in values[1:] if operands else ():
            _join(parent, values[0], name)
    return {name: _find(parent, name) for name in parent}


def written(ops: Iterable[Op], storage: Mapping[str, str]) -> dict[str, int]:
    """Return for every storage that is written to the position of the last op that writes to it."""
    return {storage[name]: position for position, op in enumerate(ops) for name in op.writes}


def _find(parent: dict[str, str], name: str) -> str:
    while parent[name] != name:
        parent[name] = parent[parent[name]]
        name = parent[name]
    return name


def _join(parent: dict[str, str], a: str, b: str) -> None:
    parent[_find(parent, b)] = _find(parent, a)
