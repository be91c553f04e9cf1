"""Plans for traces that are too long for an integer program: a prefix of the forward keeps its narrow points only."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jointtrace.passes._choice import Choice, cheapest
from jointtrace.passes._reads import Reads

PREFIXES = 8
NARROW = 2  # values: what a transformer block hands on, and what all decoder blocks read of an encoder


def prefixes(choice: Choice, fastest: frozenset[str]) -> Iterator[set[str]]:
    """Yield plans that keep of ever longer prefixes of the forward only the values at its narrowest points."""
    reads = Reads(choice)
    narrow = _narrow(choice, reads)
    for every in (1, 2):
        kept = dict.fromkeys(narrow[::every], "it is at a narrow point of the forward")
        for part in range(1, PREFIXES + 1):
            end = choice.trace.boundary * part // PREFIXES
            inside = {name for name in choice.values if reads.forward[name][0] < end}
            barred = {name: "it is kept as in the fastest plan" for name in choice.values
                      if name not in inside and name not in fastest}
            prices = {name: size if name in kept or name not in inside else size * choice.trace.boundary
                      for name, size in choice.nbytes.items()}
            yield cheapest(replace(choice, why_kept={**kept, **barred, **choice.why_kept}, nbytes=prices))


def _narrow(choice: Choice, reads: Reads) -> list[str]:
    """Return the values that lead, alone or with one other, from one part of the forward to the next, and are small."""
    forward = choice.trace.ops[: choice.trace.boundary]
    last: dict[str, int] = {}
    for position, op in enumerate(forward):
        last.update((root, position) for name in op.ins if name in choice.nbytes for root in reads.roots(name))
    alive: dict[str, int] = {}
    points: list[tuple[int, tuple[str, ...]]] = []
    for position, op in enumerate(forward):
        alive = {name: end for name, end in alive.items() if end > position}
        alive.update((name, last[name]) for name in op.outs if last.get(name, -1) > position)
        if alive:
            points.append((sum(choice.nbytes[name] for name in alive), tuple(alive)))
    small = sorted(size for size, _ in points)[len(points) // 4] if points else 0
    found = (name for size, names in points if size <= small and len(names) <= NARROW for name in names)
    return [name for name in dict.fromkeys(found) if name in choice.again]
