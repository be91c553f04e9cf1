"""compare: what thunder's tests do without jointtrace's option and with it, test by test."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Outcomes = Mapping[str, Mapping[str, Any]]  # by test: outcome, message, compiled
COLUMNS = ("file", "passed without", "passed with", "compiled by jointtrace", "regressions", "expected", "skipped")


@dataclass(frozen=True)
class Row:
    """One file: how many tests pass in each run, how many of those jointtrace compiled something for, what differs."""

    file: str
    passed_without: int
    passed_with: int
    compiled: int
    regressions: int
    expected: int
    skipped: int


@dataclass(frozen=True)
class Comparison:
    """The result.

    Attributes:
        rows: one for each file, and one for their sum.
        regressions: tests that pass without the option and not with it, and are not expected to; with what became of
            them.
        stale: expected differences that are none.
    """

    rows: tuple[Row, ...]
    regressions: dict[str, str]
    stale: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether nothing but what is expected differs."""
        return not self.regressions and not self.stale

    def table(self) -> str:
        """Return the rows as a Markdown table."""
        lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(map(str, vars(row).values())) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of outcomes; none where it is not there yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compare(without: Outcomes, with_: Outcomes, expected: Mapping[str, str]) -> Comparison:
    """Compare two runs; a test that is missing in one of them, or that killed its process, did not pass there."""
    lost = {test: _became(with_.get(test)) for test in without if _passed(without, test) and not _passed(with_, test)}
    files = sorted({test.partition("::")[0] for test in (*without, *with_)})
    rows = [_row(file, without, with_, lost, expected) for file in files]
    total = Row("all", *(sum(counts) for counts in zip(*(list(vars(row).values())[1:] for row in rows), strict=True)))
    regressions = {test: became for test, became in lost.items() if test not in expected}
    return Comparison((*rows, total), regressions, tuple(test for test in expected if test not in lost))


def _row(file: str, without: Outcomes, with_: Outcomes, lost: Mapping[str, str], expected: Mapping[str, str]) -> Row:
    tests = [test for test in {**without, **with_} if test.partition("::")[0] == file]
    passed = [test for test in tests if _passed(with_, test)]
    differs = [test for test in tests if test in lost]
    return Row(
        file,
        sum(_passed(without, test) for test in tests),
        len(passed),
        sum(bool(with_[test].get("compiled")) for test in passed),
        sum(test not in expected for test in differs),
        sum(test in expected for test in differs),
        sum(with_.get(test, {}).get("outcome") == "skipped" for test in tests),
    )


def _passed(outcomes: Outcomes, test: str) -> bool:
    return outcomes.get(test, {}).get("outcome") == "passed"


def _became(outcome: Mapping[str, Any] | None) -> str:
    return "not run" if outcome is None else f"{outcome['outcome']}: {outcome.get('message') or 'no message'}"
