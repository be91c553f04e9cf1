"""Judge every operator through every front end; what was judged of this source before is not judged again."""
from __future__ import annotations

import os
from fnmatch import fnmatch
from typing import Annotated

import typer
from conformance.ops import expected, results, table
from conformance.ops.workers import judge_all
from rich.console import Console


def main(
    only: Annotated[str, typer.Option(help="Operators to judge, as a pattern.")] = "*",
    front: Annotated[str, typer.Option(help="Front ends, as a pattern.")] = "*",
    samples: Annotated[int, typer.Option(help="At most so many samples of an operator; half of it in float64.")] = 6,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    again: Annotated[str, typer.Option(help="Judge again what has one of these verdicts (comma between).")] = "",
) -> None:
    """Judge what is missing of this source, compare with what is expected, and write the table."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    console, state = Console(), results.source_state()
    done, before = results.read(state), results.read(None)
    keys = [key for key in results.tasks() if key not in done and fnmatch(key[0], only) and fnmatch(key[2], front)]
    if again:
        verdicts = again.split(",")
        keys = [key for key in keys if key in before and before[key]["verdict"] in verdicts]
    console.print(f"{len(keys)} to judge, {len(done)} judged before; source {state}")
    judge_all(keys, samples, state, workers, console)
    rows = {key: row for key, row in results.read(None).items() if key in set(results.tasks())}
    missing = sum(key not in rows for key in results.tasks())
    console.print(f"{sum(row['state'] != state for row in rows.values())} judged of another source, {missing} not yet")
    if not missing:
        table.write(rows)
    found = expected.surprises(rows)
    for line in found:
        console.print(line, markup=False, highlight=False)
    raise typer.Exit(bool(found or missing))


if __name__ == "__main__":
    typer.run(main)
