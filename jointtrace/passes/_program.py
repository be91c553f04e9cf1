"""The choice under a limit of memory, as an integer program that states the memory of a few positions only.

After Checkmate (Jain et al., 2020), with the order of the ops fixed and each op run again at most once, right before
its first reader. Integers: for each value, is it kept; for each op, does it run again. What follows from them is
continuous: for each op and watched position, has it run again by then; for each value, is it alive there.
"""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jointtrace.passes._choice import Choice
from jointtrace.passes._linear import SLACK, Linear, Row, plus, times
from jointtrace.passes._reads import Reads

SCALE = 64  # units of the largest memory that no plan changes: the solver's tolerances are those of such numbers


@dataclass(eq=False)
class _Op:
    """An op that may run again: its variable, what it reads, the ops that read it, the first backward reader."""

    again: int
    operands: tuple[str, ...]
    outs: list[str]
    readers: list[_Op]
    first: float


class Program:
    """The integer program of one choice; `watch` adds the positions at which plans turn out to peak."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.reads = Reads(choice)
        self.unit = max(SCALE, *self.reads.fixed) / SCALE
        self.linear = Linear()
        self.kept: dict[str, int] = {}
        self.ops: dict[str, _Op] = {}
        self.readers: defaultdict[str, list[_Op]] = defaultdict(list)
        self.memory: dict[int, tuple[Row, float]] = {}
        self._made: dict[tuple[int, int], Row] = {}
        self._declare()
        self._require()

    def watch(self, position: int) -> None:
        """State how much memory is alive while the op at `position` of the trace runs."""
        forward = position < self.choice.trace.boundary
        row = self._kept_by(position) if forward else self._alive_at(position)
        self.memory[position] = row, self.reads.fixed[position] / self.unit

    def correct(self, position: int, nbytes: int) -> bool:
        """Count as much more at a watched position as the last solution has there; False where that is nothing."""
        row, fixed = self.memory[position]
        more = nbytes / self.unit - fixed - self.linear.value(row)
        self.memory[position] = row, fixed + max(0.0, more)
        return more > SLACK

    def largest(self) -> float:
        """Return the largest watched memory of the last solution in bytes."""
        return max(fixed + self.linear.value(row) for row, fixed in self.memory.values()) * self.unit

    def cheapest(self, limit: float, frugality: float = 0.0) -> set[str] | None:
        """Return the values to compute again in the cheapest plan within `limit` bytes, a kept byte costing more."""
        limits = [(row, -math.inf, limit / self.unit - fixed) for row, fixed in self.memory.values()]
        price = {kept: frugality * self.choice.nbytes[name] / self.unit for name, kept in self.kept.items()}
        return self._plan() if self.linear.solve(limits, price) else None

    def smallest(self) -> set[str] | None:
        """Return the values to compute again in a plan whose largest watched memory is least."""
        return self._plan() if self.linear.minimise_largest(list(self.memory.values())) else None

    def _plan(self) -> set[str]:
        again = {name for name, op in self.ops.items() if self.linear.solution[op.again] > 0.5}
        again -= {name for name, variable in self.kept.items() if self.linear.solution[variable] > 0.5}
        return again.union(name for name in self.choice.values if self.reads.is_view(name))

    def _declare(self) -> None:
        choice, linear = self.choice, self.linear
        names = [name for name in choice.values if self.reads.roots(name) == (name,)]
        made: defaultdict[str, list[str]] = defaultdict(list)
        for name in names:
            if name not in choice.why_kept:
                made[choice.maker[name].outs[0]].append(name)
        for outs in reversed(made.values()):  # readers first
            readers = list(dict.fromkeys(reader for name in outs for reader in self.readers[name]))
            inherits = len(readers) == 1 and self.reads.passes_on(outs, readers[0].outs)
            again = readers[0].again if inherits else linear.variable(whole=True)
            linear.costs[again] += choice.again[outs[0]] / self.unit
            first = min(self.reads.first.get(name, math.inf) for name in outs)
            op = _Op(again, self.reads.operands(choice.maker[outs[0]]), outs, readers, first)
            self.ops.update(dict.fromkeys(outs, op))
            for operand in op.operands:
                self.readers[operand].append(op)
            names = [name for name in names if not inherits or name not in outs]
        for name in names:
            if name not in choice.why_again:
                self.kept[name] = linear.variable(choice.keep(name) / self.unit, whole=True)

    def _require(self) -> None:
        """What is read exists: it is kept or computed again."""
        for root in self.reads.last:
            self.linear.add(self._exists(root), low=1.0)
        for op, operand in ((o, operand) for o in dict.fromkeys(self.ops.values()) for operand in o.operands):
            self.linear.add(plus(self._exists(operand), {op.again: -1.0}), low=0.0)

    def _exists(self, name: str) -> Row:
        kept = {self.kept[name]: 1.0} if name in self.kept else {}
        return plus(kept, {self.ops[name].again: 1.0}) if name in self.ops else kept

    def _made_by(self, op: _Op, position: int) -> Row:
        """Return an expression that is 1 where `op` has run again by the time that `position` has."""
        key = op.again, position
        if key not in self._made:
            if [reader.again for reader in op.readers] == [op.again]:
                return self._made_by(op.readers[0], position)
            parts = [part for reader in op.readers if (part := self._made_by(reader, position))]
            again = {op.again: 1.0}
            self._made[key] = again if op.first <= position else self.linear.any_of(parts, again) if parts else {}
        return self._made[key]

    def _kept_by(self, position: int) -> Row:
        """Return the bytes kept at a forward position beyond what the forward itself needs there."""
        spans = ((variable, name, *self.reads.forward[name]) for name, variable in self.kept.items())
        return {variable: self.choice.nbytes[name] / self.unit
                for variable, name, made, needed in spans if made <= position and needed < position}

    def _alive_at(self, position: int) -> Row:
        """Return the bytes of forward values alive at a backward position, kept or computed again."""
        names = dict.fromkeys((*self.kept, *self.ops))
        sizes = {name: self.choice.nbytes[name] / self.unit for name in names}
        return plus(*(times(part, sizes[name]) for name in names for part in self._alive(name, position)))

    def _alive(self, name: str, position: int) -> Iterable[Row]:
        """Yield expressions that add up to 1 where `name` is alive at `position`."""
        kept = {self.kept[name]: 1.0} if name in self.kept else {}
        made: Row = {}
        if name in self.ops and self.reads.is_real_again(name):
            made = self._made_by(self.ops[name], position)
        if self.reads.last.get(name, -1) >= position:
            return (yield from (kept, made))
        for state, by in ((kept, position - 1), (made, position)):
            if state and self.readers[name]:
                alive = {self.linear.variable(): 1.0}
                for reader in self.readers[name]:
                    later = plus({reader.again: -1.0}, self._made_by(reader, by))
                    self.linear.add(plus(alive, times(state, -1.0), later), low=-1.0)
                yield alive
