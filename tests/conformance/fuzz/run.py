"""`make fuzz`: generated programs through both front ends, compared with eager PyTorch.

    python tests/conformance/fuzz/run.py --programs 2000 --seed 0

One seed always gives the same programs. A program that goes wrong is made smaller and printed as a script.
"""
from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
if __name__ in ("__main__", "__mp_main__"):
    sys.path[:0] = [str(Path(__file__).parents[2])]
    warnings.simplefilter("ignore")

import typer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import HypothesisException
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

import jointtrace  # noqa: F401  before thunder

BATCH = 25
LINES = 10  # statements of a program, at most
COMPILED = 10  # programs for each front end that run in regions of Inductor, whose C++ compiler takes seconds for one
TASKS = 8  # batches that one process runs: compilers keep memory
FAILURES = 3  # of one batch; then the rest of it is not run
LIMIT = 400  # characters of a message that are kept


@dataclass
class Batch:
    """Some programs of one seed, and how they went."""

    frontend: str
    executor: str
    seed: int
    programs: int
    tally: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """How many programs eager PyTorch ran, and so were compared."""
        return sum(self.tally[kind] for kind in ("right", "refused", "wrong"))

    def run(self) -> Batch:
        """Run the programs; return this batch, filled in."""
        for attempt in range(10 * FAILURES):
            if self.done >= self.programs or len(self.failures) >= FAILURES:
                break
            self._round(self.seed + 1_000_003 * attempt)
        return self

    def _round(self, seed: int) -> None:
        from conformance.fuzz.compare import Verdict, Wrong, judge
        from conformance.fuzz.generate import programs
        from conformance.fuzz.program import Program

        known: dict[str, Verdict] = {}
        failing: list[tuple[Program, Wrong]] = []

        @seeded(seed)
        @settings(max_examples=2 * self.programs, database=None, deadline=None, report_multiple_bugs=False,
                  phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
        @given(programs(LINES))
        def each(program: Program) -> None:
            text = program.script(self.frontend, self.executor)
            if text in known or (self.done >= self.programs and not failing):
                return
            try:
                verdict = judge(program, self.frontend, self.executor)
            except Wrong as wrong:
                failing.append((program, wrong))
                raise
            known[text] = verdict
            if not failing:
                self._count(verdict)

        try:
            each()
        except (Wrong, HypothesisException) as error:
            program, wrong = failing[-1]
            self.tally["wrong"] += 1
            where = f"{self.frontend}, {self.executor}, seed {seed}, {type(error).__name__}"
            self.failures.append(f"{where}\n{wrong}\n\n{program.script(self.frontend, self.executor)}")

    def _count(self, verdict: object) -> None:
        kind, why = verdict.kind, verdict.why  # type: ignore[attr-defined]
        self.tally[kind] += 1
        if why:
            self.refusals[why.splitlines()[0][:LIMIT]] += 1


def batches(programs: int, seed: int, frontends: tuple[str, ...], compiled: int) -> Iterator[Batch]:
    """Yield the batches of a run; half of the programs go through each front end."""
    for place, frontend in enumerate(frontends):
        count = programs // len(frontends) + (place < programs % len(frontends))
        first = 10_000 * seed + 5_000 * place
        compiled = min(compiled, count // 2)
        if compiled:
            yield Batch(frontend, "torch_compile", first, compiled)
        for number, start in enumerate(range(compiled, count, BATCH), start=1):
            yield Batch(frontend, "eager", first + number, min(BATCH, count - start))


def main(
    programs: Annotated[int, typer.Option(help="how many programs are compared with eager")] = 2000,
    seed: Annotated[int, typer.Option(help="another seed gives other programs")] = 0,
    jobs: Annotated[int, typer.Option(help="processes at a time")] = 2,
    minutes: Annotated[float, typer.Option(help="give up after so long")] = 45.0,
    frontend: Annotated[str, typer.Option(help="thunder, dynamo, or both")] = "both",
    compiled: Annotated[int, typer.Option(help="how many of each front end's programs Inductor compiles")] = COMPILED,
) -> None:
    """Compare generated programs with eager PyTorch; fail if one is wrong, or not all were run in time."""
    frontends = ("thunder", "dynamo") if frontend == "both" else (frontend,)
    todo = [*batches(programs, seed, frontends, compiled)]
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=TASKS) as pool:
        finished = _watch(pool.imap_unordered(Batch.run, todo), len(todo), programs, start + 60 * minutes)
    raise typer.Exit(_report(finished, programs, seed, time.monotonic() - start))


def _watch(results: Any, batches: int, programs: int, deadline: float) -> list[Batch]:
    """Show progress until all is done or the time is up; return the finished batches."""
    finished: list[Batch] = []
    columns = (SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, refresh_per_second=1) as progress:
        task = progress.add_task("programs", total=programs)
        while len(finished) < batches:
            try:
                batch = results.next(max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            finished.append(batch)
            progress.update(task, advance=batch.done)
            say = partial(progress.console.print, markup=False, highlight=False, soft_wrap=True)
            for failure in batch.failures:
                say(f"\nWRONG: {failure}")
            if not progress.console.is_terminal:
                say(f"{sum(b.done for b in finished)} of {programs}")
    return finished


def _report(finished: list[Batch], programs: int, seed: int, seconds: float) -> int:
    """Print the totals; return the exit status."""
    total: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    lines = []
    for name in sorted({batch.frontend for batch in finished}):
        tally = sum((batch.tally for batch in finished if batch.frontend == name), Counter())
        lines.append(f"{name}: {tally['right']} right, {tally['refused']} refused, {tally['wrong']} wrong "
                     f"({tally['invalid']} more that eager does not run)")
        total += tally
    for batch in finished:
        refusals += batch.refusals
    lines += [f"  refused {count}: {why}" for why, count in refusals.most_common(20)]
    compared = total["right"] + total["refused"] + total["wrong"]
    lines.append(f"seed {seed}: {compared} of {programs} programs in {seconds / 60:.1f} minutes")
    typer.echo("\n".join(lines))
    return int(bool(total["wrong"]) or compared < programs)


if __name__ == "__main__":
    typer.run(main)
