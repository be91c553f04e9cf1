"""What every benchmark shares: facts about the machine, figures beside what they must be, a table, and JSON lines."""
from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # only what prints a table needs rich
    from rich.console import Console
    from rich.table import Table

RESULTS = Path(__file__).parent / "results"
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


FILE_WIDTH = 160


@dataclass(frozen=True)
class Figure:
    """One measured number and the most it may be."""

    name: str
    measured: float
    limit: float
    unit: str = "x"

    @property
    def passed(self) -> bool:
        """A measurement that is not a number does not pass."""
        return self.measured <= self.limit


def console_of() -> Console:
    """Return the console to print on; off a terminal it is wide enough for every table."""
    from rich.console import Console

    return Console() if Console().is_terminal else Console(width=FILE_WIDTH)


@contextmanager
def cold_cache() -> Iterator[None]:
    """Give Inductor an empty cache for as long as the context lasts, so that first calls compile."""
    before = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Inductor's workers may still write to it
        os.environ[CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[CACHE_VARIABLE]
            else:
                os.environ[CACHE_VARIABLE] = before


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge the numbers: processor, cores, threads, load, versions."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "thunder": version("lightning-thunder"),
    }


def processor() -> str:
    """Return the processor's name as Linux tells it, elsewhere the platform's word for it."""
    facts = Path("/proc/cpuinfo")
    names = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    found = [line.split(":", 1)[1].strip() for line in names if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def describe(facts: Mapping[str, Any]) -> str:
    """Return the machine's facts as one line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def table_of(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose first column is text and whose other columns are numbers."""
    from rich.table import Table

    table = Table(title=title)
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="right" if column else "left", no_wrap=not column)
    for row in rows:
        table.add_row(*row)
    return table


def judge(figures: Sequence[Figure], console: Console) -> bool:
    """Print each figure beside what it must be and return whether all pass."""
    if figures:
        rows = [
            (figure.name, f"{figure.measured:.3f} {figure.unit}", f"<= {figure.limit:g} {figure.unit}", verdict(figure))
            for figure in figures
        ]
        console.print(table_of("Figures", ("figure", "measured", "must be", "verdict"), rows))
    return all(figure.passed for figure in figures)


def verdict(figure: Figure) -> str:
    """Return the figure's verdict as the word the table and the records use."""
    return "pass" if figure.passed else "FAIL"


def write_lines(
    path: Path, facts: Mapping[str, Any], records: Iterable[Mapping[str, Any]], figures: Iterable[Figure]
) -> None:
    """Append one JSON line per record and figure to `path`, each with the machine's facts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    judged = [{"figure": asdict(figure), "verdict": verdict(figure)} for figure in figures]
    with path.open("a", encoding="utf-8") as file:
        for record in (*records, *judged):
            file.write(json.dumps({**record, "machine": dict(facts)}) + "\n")
