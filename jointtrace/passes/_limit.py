"""The cheapest plan whose planned peak stays within a limit of memory.

An integer program states the memory of a few positions; a plan that peaks elsewhere has that position watched too, and
the program is solved again. As what is not watched only forbids plans, a plan that keeps the limit is the cheapest.
Where there are too many ops for that, it is one of a few plans: a prefix of the forward keeps its narrow points only.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jointtrace.ir.memory import MemoryPlan, plan_memory
from jointtrace.ir.trace import Trace
from jointtrace.passes._choice import Choice, cheapest
from jointtrace.passes._copy import knowing_copies, with_copies
from jointtrace.passes._program import Program
from jointtrace.passes._reads import Reads
from jointtrace.passes.dce import dce

ROUNDS = 40  # programs to solve; most choices take fewer than ten
MOST_OPS = 300  # that may run again: a program of 170 takes seconds, and its tree grows faster than it does
WATCHED = 6  # positions of the backward from the start; many more make each program slow, none takes more programs
PREFIXES = 8
NARROW = 2  # values: what a transformer block hands on, and what all decoder blocks read of an encoder


@dataclass(frozen=True)
class Planned:
    """A plan, its cost, its planned peak, and the position of the original trace where that is."""

    again: frozenset[str]
    cost: int
    peak_bytes: int
    position: int


def planned(choice: Choice, again: Iterable[str]) -> Planned:
    """Return the plan that computes the values in `again` again."""
    again = frozenset(again)
    trace, copied = with_copies(choice.trace, again)
    trace = dce(trace)
    memory = plan_memory(trace, knowing_copies(choice.fused, copied))
    return Planned(again, choice.cost(again), memory.peak_bytes, _original(choice.trace, trace, memory))


class Search:
    """Plans of one choice, beginning with the cheapest one without a limit."""

    def __init__(self, choice: Choice, fastest: Iterable[str]) -> None:
        self.choice = choice
        self.fastest = planned(choice, fastest)
        self.known = [self.fastest]
        self.solved: set[int | None] = set()
        self.program: Program | None = None
        program = Program(choice)
        if len(set(program.ops.values())) <= MOST_OPS:
            self.program = program
            begin, end = choice.trace.boundary, len(choice.trace.ops)
            spread = (begin + (end - begin) * part // (WATCHED + 1) for part in range(WATCHED + 1))
            for position in dict.fromkeys((self.fastest.position, *spread)):
                program.watch(min(position, end - 1))
        else:
            self.known += [planned(choice, again) for again in _prefixes(choice, frozenset(fastest))]

    def smallest(self) -> Planned:
        """Return the plan with the least planned peak."""
        self._improve(None)
        return min(self.known, key=lambda plan: (plan.peak_bytes, plan.cost))

    def within(self, limit: int) -> Planned | None:
        """Return the cheapest plan with a planned peak of at most `limit` bytes; None where none was found."""
        self._improve(limit)
        fitting = [plan for plan in self.known if plan.peak_bytes <= limit]
        return min(fitting, key=lambda plan: (plan.cost, plan.peak_bytes), default=None)

    def at(self, fraction: float) -> Planned:
        """Return the cheapest plan at a fraction of the way from the least planned peak to that of the fastest plan.

        The plans at all tenths are looked for, whatever the fraction: of plans that are known alike the cheapest one
        never peaks higher for a smaller limit, though none of them is proven to be the cheapest there is.
        """
        least = self.smallest().peak_bytes
        limits = [least + int(tenth / 10 * (self.fastest.peak_bytes - least)) for tenth in range(10)]
        for limit in reversed(limits):
            self._improve(limit)
        found = self.within(least + int(fraction * (self.fastest.peak_bytes - least)))
        assert found is not None
        return found

    def _improve(self, limit: int | None) -> None:
        """Solve again and again, each time with the peak of the last plan watched, until that is known or allowed."""
        program = self.program
        if program is None or limit in self.solved or (limit or 0) >= self.fastest.peak_bytes:
            return
        self.solved.add(limit)
        for _ in range(ROUNDS):
            again = program.smallest() if limit is None else program.cheapest(limit)
            if again is None:
                return
            if limit is None and program.largest() >= min(plan.peak_bytes for plan in self.known):
                return  # as the program now has it, no plan is better than the best one
            plan = planned(self.choice, again)
            self.known.append(plan)
            if limit is not None and plan.peak_bytes <= limit:
                return
            if plan.position not in program.memory:
                program.watch(plan.position)
            elif not program.correct(plan.position, plan.peak_bytes):
                return


def _original(before: Trace, after: Trace, memory: MemoryPlan) -> int:
    """Return where in `before` the peak of `after` lies; copies belong to the op that they stand before."""
    positions = {name: position for position, op in enumerate(before.ops) for name in op.outs}
    following = (positions[name] for op in after.ops[memory.peak:] for name in op.outs if name in positions)
    return next(following, len(before.ops) - 1)


def _prefixes(choice: Choice, fastest: frozenset[str]) -> Iterator[set[str]]:
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
