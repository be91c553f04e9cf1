"""What is known not to pass, each with its reason; whatever is listed and passes is an error."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conformance.ops.judge import Verdict
from conformance.ops.results import Key, Row
from conformance.ops.table import by_operator


@dataclass(frozen=True)
class Expected:
    """Operators with one verdict, through one front end, for one reason."""

    front: str
    verdict: Verdict
    reason: str
    ops: str


EXPECTED: tuple[Expected, ...] = ()


def verdict_of(op: str, front: str) -> Verdict:
    """Return the expected verdict on an operator."""
    return _TABLE.get((op, front), Verdict.PASS)


def surprises(rows: Mapping[Key, Row]) -> list[str]:
    """Return a line for each operator whose verdict is not the expected one."""
    return [
        f"{op}, {front}: {row['verdict']}, expected {verdict_of(op, front).value}. {row['reason']}"
        for front in dict.fromkeys(front for _, _, front in rows)
        for op, row in by_operator(rows, front).items() if row["verdict"] != verdict_of(op, front).value
    ]


_TABLE = {(op, entry.front): entry.verdict for entry in EXPECTED for op in entry.ops.split()}
