"""The coverage table of the README, and the list behind it in docs/coverage.md."""
from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from conformance.ops.judge import ORDER, Verdict
from conformance.ops.results import ROOT, Key, Row

START, END = "<!-- ops: start -->", "<!-- ops: end -->"
FRONTS = ("torch.compile", "thunder")
MEANING = {
    Verdict.PASS: "pass: all samples, both dtypes",
    Verdict.REFUSED: "refused with a clear error, at least one sample",
    Verdict.HOST_REFUSES: "torch.compile, or thunder, cannot trace it by itself either",
    Verdict.HOST_WRONG: "not eager's value, and not with torch.compile's `aot_eager` either",
    Verdict.CRASH: "another error",
    Verdict.WRONG: "wrong",
}


def by_operator(rows: Mapping[Key, Row], front: str) -> dict[str, Row]:
    """Return the row of the dtype with the worst verdict, by operator; the same in whichever order they were judged."""
    worst: dict[str, Row] = {}
    for (op, _, of), row in sorted(rows.items(), key=itemgetter(0)):
        if of == front and (op not in worst or _rank(row) > _rank(worst[op])):
            worst[op] = row
    return worst


def _rank(row: Row) -> int:
    return ORDER.index(Verdict(row["verdict"]))


def table(rows: Mapping[Key, Row]) -> str:
    """Return the table as Markdown."""
    worst = {front: by_operator(rows, front) for front in FRONTS}
    counts = {front: Counter(row["verdict"] for row in worst[front].values()) for front in FRONTS}
    lines = [f"| | {' | '.join(FRONTS)} |", "|---|---|---|", _line("operators", (len(worst[f]) for f in FRONTS))]
    for verdict, meaning in MEANING.items():
        lines.append(_line(meaning, (_share(counts[f][verdict.value], len(worst[f])) for f in FRONTS)))
    lines.append(_line("samples that pass", (_samples(rows, front) for front in FRONTS)))
    lines.append(_line("operators that pass with the torch_compile executor, of a few",
                       (_compiled(rows, front) for front in FRONTS)))
    return "\n".join(lines)


def _compiled(rows: Mapping[Key, Row], front: str) -> str:
    ours = [row for (_, _, of), row in rows.items() if of == f"{front}, torch_compile"]
    return f"{sum(row['verdict'] == Verdict.PASS.value for row in ours)} of {len(ours)}"


def _line(name: str, cells: Iterable[Any]) -> str:
    return f"| {name} | {' | '.join(str(cell) for cell in cells)} |"


def _share(count: int, total: int) -> str:
    return f"{count} ({100 * count / total:.1f} %)" if count and total else "0"


def _samples(rows: Mapping[Key, Row], front: str) -> str:
    ours = [row for (_, _, of), row in rows.items() if of == front]
    return f"{sum(row['passed'] for row in ours)} of {sum(row['samples'] for row in ours)}"


def listing(rows: Mapping[Key, Row]) -> str:
    """Return what does not pass, by front end and verdict, as Markdown."""
    parts = ["# Operators that do not pass", "", "Written by `make conformance`. An operator is listed where one of "
             "its samples does not pass; in brackets how many do, of one dtype.", ""]
    for front in FRONTS:
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in by_operator(rows, front).values():
            groups[row["verdict"]].append(row)
        parts += [f"## {front}", ""]
        for verdict, meaning in MEANING.items():
            found = sorted(groups[verdict.value], key=lambda row: row["op"])
            if found and verdict is not Verdict.PASS:
                parts += [f"### {meaning[0].upper()}{meaning[1:]}: {len(found)}", "", *map(_item, found), ""]
    return "\n".join(parts).rstrip() + "\n"


def _item(row: Row) -> str:
    return f"- `{row['op']}` ({row['passed']} of {row['samples']}): {clean(row['reason'])}"


def clean(reason: str) -> str:
    """Return a reason without where on this machine it arose, and without what would be Markdown."""
    reason = re.sub(r" ?\(?/[^ ]*:\d+\)?| at 0x[0-9a-f]+", "", reason)
    return re.sub(r"[|*_<>`]", lambda match: "\\" + match[0], " ".join(reason.split())[:200])


def write(rows: Mapping[Key, Row], root: Path = ROOT) -> None:
    """Write the table between its markers in the README, and the list."""
    readme = root / "README.md"
    before, _, rest = readme.read_text().partition(START)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{START}\n{table(rows)}\n{END}{after}")
    (root / "docs").mkdir(exist_ok=True)
    (root / "docs" / "coverage.md").write_text(listing(rows))
