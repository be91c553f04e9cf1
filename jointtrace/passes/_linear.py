"""A mixed integer linear program that grows: variables, rows, and HiGHS to solve it.

Deterministic on every machine: the search is limited by nodes of its tree, never by time.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

NODES = 100
GAP = 5e-3  # of a solution's cost to the proven bound
HARD_NODES, HARD_GAP = 10, 5e-2  # where the largest sum is to be least: good solutions come soon, the bound is poor
HARD = 60  # whole variables from which on that holds
TIE = 1e-9  # of equally good solutions always the same one
SLACK = 1e-5  # what the solver takes for equal

Row = dict[int, float]
"""A linear expression: the factor of each variable."""
Bounded = tuple[Row, float, float]
"""A linear expression and its bounds."""


class Linear:
    """Variables between 0 and 1, whole or continuous, their costs, and bounded rows of them."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[Bounded] = []
        self.solution: Sequence[float] = ()

    def variable(self, cost: float = 0.0, *, whole: bool = False) -> int:
        """Return a new variable."""
        self.costs.append(cost + (TIE * len(self.costs) if whole else 0.0))
        self.whole.append(whole)
        return len(self.costs) - 1

    def add(self, row: Row, low: float = -math.inf, high: float = math.inf) -> None:
        """Bound an expression."""
        self.rows.append((row, low, high))

    def any_of(self, parts: Sequence[Row], of: Row) -> Row:
        """Return an expression that is 1 where `of` is and one of `parts` is."""
        either = {self.variable(): 1.0}
        self.add(plus(either, times(of, -1.0)), high=0.0)
        self.add(plus(either, *(times(part, -1.0) for part in parts)), high=0.0)
        for part in parts:
            self.add(plus(either, times(of, -1.0), times(part, -1.0)), low=-1.0)
        return either

    def solve(self, limits: Sequence[Bounded], extra: Row | None = None) -> bool:
        """Find the cheapest solution that keeps `limits` too; False where none was found.

        `extra` adds to the costs of some variables, for this time.
        """
        costs = [cost + (extra or {}).get(i, 0.0) for i, cost in enumerate(self.costs)]
        return self._solve(costs, self.whole, np.ones(len(self.costs)), limits, NODES, GAP)

    def minimise_largest(self, sums: Sequence[tuple[Row, float]], weight: float = 1e-6) -> bool:
        """Find a solution whose largest sum (an expression and a number) is least; costs count by `weight`."""
        largest = len(self.costs)
        limits = [(plus(row, {largest: -1.0}), -math.inf, -number) for row, number in sums]
        hard = sum(self.whole) > HARD
        return self._solve([*(weight * cost for cost in self.costs), 1.0], [*self.whole, False],
                           np.append(np.ones(largest), np.inf), limits,
                           HARD_NODES if hard else NODES, HARD_GAP if hard else GAP)

    def value(self, row: Row) -> float:
        """Return an expression's value in the last solution; variables made since then count as 0."""
        return sum(factor * self.solution[i] for i, factor in row.items() if i < len(self.solution))

    def _solve(
        self, costs: Sequence[float], whole: Sequence[bool], upper: np.ndarray, limits: Sequence[Bounded], nodes: int,
        gap: float,
    ) -> bool:
        rows = [*self.rows, *limits]
        entries = [(i, j, f) for i, (row, _, _) in enumerate(rows) for j, f in row.items()]
        if not entries:  # nothing to choose: what is asked holds, or does not
            self.solution = [0.0] * len(costs)
            return all(low <= 0 <= high for _, low, high in rows)
        i, j, factors = zip(*entries, strict=True)
        matrix = coo_array((factors, (i, j)), shape=(len(rows), len(costs))).tocsr()
        low, high = (np.array([bounds[which] for bounds in rows]) for which in (1, 2))
        found = milp(
            costs, integrality=whole, bounds=Bounds(0, upper),  # type: ignore[arg-type]
            constraints=LinearConstraint(matrix, low, high),  # type: ignore[arg-type]
            options={"node_limit": nodes, "mip_rel_gap": gap},
        )
        if found.x is None:
            return False
        self.solution = found.x
        return True


def plus(*rows: Row) -> Row:
    """Return the sum of expressions."""
    total: Row = {}
    for row in rows:
        for variable, factor in row.items():
            total[variable] = total.get(variable, 0.0) + factor
    return total


def times(row: Row, factor: float) -> Row:
    """Return a multiple of an expression."""
    return {variable: factor * value for variable, value in row.items()}
