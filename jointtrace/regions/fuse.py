"""fuse: group the ops that executors claim into regions, one op each. Nothing is compiled.

Requires  SSA; forward ops before backward ops.
Ensures   same inputs, outputs and values. The ops of a region have one phase, executor and device; regions are as large
          as that allows, but none reaches over a collective, a wait or an opaque op: their place is a schedule. Random
          ops keep their order, so do writes, and what is read before it is overwritten still is.
Cost      one walk to place the ops and one to emit them, O(ops + operands), and a heap over what is emitted.
"""
from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from jointtrace.ir.facts import uses
from jointtrace.ir.op import NEVER_FUSED, Op, Tag, Target, TensorType, Type, Var
from jointtrace.ir.trace import Trace
from jointtrace.passes._storage import storages

if TYPE_CHECKING:
    from jointtrace.executors.base import Executor

ORDERED = frozenset({Tag.RANDOM, Tag.MUTATES})
BARRIERS = frozenset({Tag.COLLECTIVE, Tag.WAIT, Tag.OPAQUE})
INHERITED = frozenset({Tag.RANDOM, Tag.COMPUTE_BOUND, Tag.RECOMPUTE})  # true of a region where true of one of its ops

Claim = tuple["Executor", str]  # and the device


def fuse(trace: Trace, executors: Sequence[Executor]) -> Trace:
    """Return `trace` with each group of ops that one executor claims, and wants as a group, as one op with a body."""
    readers, storage = uses(trace), storages(trace)
    serial: Counter[str] = Counter()
    ops: list[Op] = []
    for start, end in ((0, trace.boundary), (trace.boundary, len(trace.ops))):
        half = trace.ops[start:end]
        claims = [_claim(op, trace.types, executors) for op in half]
        depends = _dependencies(half, storage)
        for members, executor in _units(half, claims, depends):
            if executor is None:
                ops += [half[i] for i in members]
                continue
            region = _region([half[i] for i in members], {start + i for i in members}, readers, trace)
            name = f"{executor.name}_{serial[executor.name]}_{region.phase.value}"
            serial[executor.name] += 1
            ops.append(region.replace(target=Target(name)))
    return trace.rebuild(ops, by="fuse")


def executor_of(region: Op) -> str:
    """Return the name of the executor that claimed `region`."""
    return region.target.name.rsplit("_", 2)[0]


def _claim(op: Op, types: Mapping[str, Type], executors: Sequence[Executor]) -> Claim | None:
    """Return the first executor that can run `op`, with the op's device; None where it runs by itself."""
    devices = {t.device for t in (types.get(name) for name in (*op.ins, *op.outs)) if isinstance(t, TensorType)}
    if op.tags & NEVER_FUSED or len(devices) != 1:
        return None
    executor = next((e for e in executors if e.can_run(op, types)), None)
    return (executor, devices.pop()) if executor is not None and executor.fuses else None


def _dependencies(ops: Sequence[Op], storage: Mapping[str, str]) -> list[set[int]]:
    """Return for each op the ops that must run before it: it reads what they made, or must follow their effects."""
    made: dict[str, int] = {}
    written: dict[str, int] = {}
    touched: defaultdict[str, list[int]] = defaultdict(list)  # by what storage, since it was last written to
    last: dict[Tag, int] = {}
    depends: list[set[int]] = []
    for position, op in enumerate(ops):
        before = {made[name] for name in op.ins if name in made}
        for tag in op.tags & ORDERED:
            before.update({last[tag]} if tag in last else ())
            last[tag] = position
        roots = {storage[name] for name in op.ins}
        before.update(written[root] for root in roots if root in written)
        for root in {storage[name] for name in op.writes}:
            before.update(touched.pop(root, ()))
            written[root] = position
        for root in roots:
            touched[root].append(position)
        made.update(dict.fromkeys(op.outs, position))
        depends.append(before)
    return depends


def _units(
    ops: Sequence[Op], claims: list[Claim | None], depends: list[set[int]]
) -> Iterator[tuple[list[int], Executor | None]]:
    """Yield what is emitted one after the other: the members of a region with its executor, or one op by itself."""
    groups: defaultdict[tuple[int, Claim], list[int]] = defaultdict(list)
    for position, level in enumerate(_levels(ops, claims, depends)):
        claim = claims[position]
        if claim is not None:
            groups[level, claim].append(position)
    unit_of = list(range(len(ops)))
    regions: dict[int, tuple[list[int], Executor]] = {}
    for (_, (executor, _device)), members in groups.items():
        if executor.wants([ops[i] for i in members]):
            regions[members[-1]] = (members, executor)
            for i in members:
                unit_of[i] = members[-1]
    for unit in _in_order(unit_of, depends):
        yield regions.get(unit, ([unit], None))


def _levels(ops: Sequence[Op], claims: list[Claim | None], depends: list[set[int]]) -> list[int]:
    """Return levels that only rise along dependencies, and do rise where one leaves a claim.

    Ops of one claim and level hence form a region that no path leaves and enters again, and all regions together can be
    put in order. Nothing rises where a claim is entered, so ops that depend on inputs alone separate nothing.
    """
    levels: list[int] = []
    floor = top = 0
    for position, op in enumerate(ops):
        if op.tags & BARRIERS:
            floor = top + 1
        level = floor
        for producer in depends[position]:
            leaves = claims[producer] is not None and claims[producer] != claims[position]
            level = max(level, levels[producer] + leaves)
        levels.append(level)
        top = max(top, level)
    return levels


def _in_order(unit_of: list[int], depends: list[set[int]]) -> Iterator[int]:
    """Yield the units in dependency order, and else in the original one (a unit is named by its last op)."""
    waits_for: dict[int, set[int]] = {unit: set() for unit in unit_of}
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for position, before in enumerate(depends):
        unit = unit_of[position]
        for other in {unit_of[i] for i in before} - waits_for[unit] - {unit}:
            waits_for[unit].add(other)
            followers[other].append(unit)
    missing = {unit: len(others) for unit, others in waits_for.items()}
    ready = [unit for unit, count in missing.items() if not count]
    heapq.heapify(ready)
    while ready:
        unit = heapq.heappop(ready)
        yield unit
        for follower in followers[unit]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, follower)


def _region(ops: list[Op], positions: set[int], readers: Mapping[str, list[int]], trace: Trace) -> Op:
    made = dict.fromkeys(name for op in ops for name in op.outs)
    inputs = dict.fromkeys(name for op in ops for name in op.ins if name not in made)
    outputs = [name for name in made if not positions.issuperset(readers.get(name, ()))]
    types = {name: trace.types[name] for name in (*inputs, *made) if name in trace.types}
    out = tuple(Var(name) for name in outputs)
    body = Trace(tuple(inputs), tuple(ops), out, types=types, by="fuse")
    tags = frozenset(tag for op in ops for tag in op.tags & INHERITED)
    args = tuple(Var(name) for name in inputs)
    return Op(Target("region"), args, out=out, tags=tags, phase=ops[0].phase, body=body)
