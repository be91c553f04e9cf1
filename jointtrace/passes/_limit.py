"""The cheapest plan whose planned peak stays within a limit of memory.

An integer program states the memory of a few positions; a plan that peaks elsewhere has that position watched too, and
the program is solved again. As what is not watched only forbids plans, a plan that keeps the limit is the cheapest.
Where there are too many ops for that, it is one of a few plans: a prefix of the forward keeps its narrow points only.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from jointtrace.ir.memory import MemoryPlan, plan_memory
from jointtrace.ir.trace import Trace
from jointtrace.passes._choice import Choice, plan_of
from jointtrace.passes._copy import knowing_copies, with_copies
from jointtrace.passes._prefixes import prefixes
from jointtrace.passes._program import Program
from jointtrace.passes.dce import dce

ROUNDS = 40  # programs to solve; most choices take fewer than ten
HARD_ROUNDS = 8  # for the least peak: of 17 for a 4-layer Llama the later ones took ten times as long for 7 % less
FRUGALITY = 16.0  # what a kept byte costs more where the least memory is asked for
FEWEST_OPS = 7  # that may run again: up to here all plans are looked at
LEEWAY = 1.1  # over the least peak, there: at the least itself nearly all that is kept has to be
MOST_OPS = 300  # that may run again: a program of 170 takes seconds, and its tree grows faster than it does
WATCHED = 6  # positions of the backward from the start; many more make each program slow, none takes more programs


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
        self.solved: set[tuple[int | None, float]] = set()
        self.program: Program | None = None
        program = Program(choice)
        ops = len(set(program.ops.values()))
        if ops <= FEWEST_OPS:
            self.known += [planned(choice, again) for again in _every(choice, program)]
        elif ops <= MOST_OPS:
            self.program = program
            begin, end = choice.trace.boundary, len(choice.trace.ops)
            spread = (begin + (end - begin) * part // (WATCHED + 1) for part in range(WATCHED + 1))
            for position in dict.fromkeys((self.fastest.position, *spread)):
                program.watch(min(position, end - 1))
        else:
            self.known += [planned(choice, again) for again in prefixes(choice, frozenset(fastest))]

    @cached_property
    def smallest(self) -> Planned:
        """The plan with the least planned peak that was found."""
        self._improve(None)
        return min(self.known, key=lambda plan: (plan.peak_bytes, plan.cost))

    def within(self, limit: int) -> Planned | None:
        """Return the cheapest plan with a planned peak of at most `limit` bytes; None where none was found."""
        self._improve(limit)
        return min(self._fitting(limit), key=lambda plan: (plan.cost, plan.peak_bytes), default=None)

    def at(self, fraction: float) -> Planned:
        """Return the cheapest plan at a fraction of the way from the least planned peak to that of the fastest plan.

        At 0 one with nearly the least peak (`LEEWAY`) that also keeps little. The plans at all tenths are looked for,
        whatever the fraction: of plans that are known alike the cheapest one never peaks higher for a smaller limit.
        """
        least, most = self.smallest.peak_bytes, self.fastest.peak_bytes
        limits = [least + int(tenth / 10 * (most - least)) for tenth in range(10)]
        for limit in reversed(limits):
            self._improve(limit)
        nearest = self.within(limits[1])
        smallest = min(int(LEEWAY * least), nearest.peak_bytes if nearest else most)
        self._improve(smallest, FRUGALITY)
        if fraction == 0:
            return min(self._fitting(smallest), key=self.frugal_cost)
        found = self.within(least + int(fraction * (most - least)))
        assert found is not None
        return found

    def frugal_cost(self, plan: Planned) -> float:
        """Return what a plan costs where a kept byte counts for more."""
        return plan.cost + FRUGALITY * sum(self.choice.nbytes[name] for name in plan_of(self.choice, plan.again)[0])

    def _fitting(self, limit: int) -> list[Planned]:
        return [plan for plan in self.known if plan.peak_bytes <= limit]

    def _improve(self, limit: int | None, frugality: float = 0.0) -> None:
        """Solve again and again, each time with the peak of the last plan watched, until that is known or allowed."""
        program = self.program
        if program is None or (limit, frugality) in self.solved or (limit or 0) > self.fastest.peak_bytes:
            return
        self.solved.add((limit, frugality))
        for _ in range(ROUNDS if limit is not None else HARD_ROUNDS):
            again = program.smallest() if limit is None else program.cheapest(limit, frugality)
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


def _every(choice: Choice, program: Program) -> Iterator[set[str]]:
    """Yield the values that are computed again in every plan there is; views are, whatever else is."""
    views = {name for name in choice.values if program.reads.is_view(name)}
    for chosen in product((False, True), repeat=len(set(program.ops.values()))):
        run = dict(zip(dict.fromkeys(program.ops.values()), chosen, strict=True))
        yield views.union(name for name, op in program.ops.items() if run[op])


def _original(before: Trace, after: Trace, memory: MemoryPlan) -> int:
    """Return where in `before` the peak of `after` lies; copies belong to the op that they stand before."""
    positions = {name: position for position, op in enumerate(before.ops) for name in op.outs}
    following = (positions[name] for op in after.ops[memory.peak:] for name in op.outs if name in positions)
    return next(following, len(before.ops) - 1)
