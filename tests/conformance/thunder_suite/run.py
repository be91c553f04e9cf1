"""run: thunder's own tests without jointtrace's option and with it, in the environment of this interpreter.

Every file runs in a process of its own. What a former run of the same jointtrace and the same plugin left in the folder
of results is not run again. Prints the comparison, writes it to table.md in that folder, and exits with 1 where
something differs that `expected` does not list.
"""
from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from compare import compare, read_lines
from expected import EXPECTED

HERE = Path(__file__).parent
MODES = {"without": (), "with": ("--delay-trace-split",)}
SLOWEST_FIRST = ("test_jit_general", "test_grad", "test_ops", "test_networks", "test_core", "test_dynamo")
SELECTED = {"test_ops": ("-k", "torch_cpu and (float32 or int64 or bool8)")}  # one executor, three dtypes: 639
TEST_SECONDS, FILE_SECONDS = 300, 3600
RESTARTS = 20  # of a file whose process a test killed


def tests_folder() -> Path:
    """Return the folder of thunder's tests, without importing thunder."""
    spec = importlib.util.find_spec("thunder")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "tests"


def fingerprint(files: Iterable[Path]) -> str:
    """Return a short hash of what stands in `files`."""
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:12]


def folders(results: Path) -> dict[str, Path]:
    """Return where each mode's outcomes are: those without the option depend on the repairs of thunder alone."""
    spec = importlib.util.find_spec("jointtrace")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    ours = [HERE / "plugin.py", HERE / "sitecustomize.py"]
    return {
        "without": results / f"without-{fingerprint([*ours, *(package / 'compat').rglob('*.py')])}",
        "with": results / f"with-{fingerprint([*ours, *package.rglob('*.py')])}",
    }


def run_file(file: Path, mode: str, folder: Path) -> None:
    """Run one file of tests to its end; after a test that killed the process, go on behind it."""
    done = folder / f"{file.stem}.done"
    command = [
        sys.executable, "-m", "pytest", str(file), "-c", str(HERE / "suite.ini"), f"--rootdir={file.parent}",
        f"--timeout={TEST_SECONDS}", "--outcomes", str(folder / f"{file.stem}.jsonl"), *MODES[mode],
        *SELECTED.get(file.stem, ())]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    scratch = folder / "scratch" / file.stem
    scratch.mkdir(parents=True, exist_ok=True)
    for _ in range(0 if done.exists() else RESTARTS):
        with (folder / f"{file.stem}.log").open("a") as log, contextlib.suppress(subprocess.TimeoutExpired):
            ended = subprocess.run(command, cwd=scratch, env=environment, stdout=log, stderr=log, check=False,
                                   timeout=FILE_SECONDS)
            if ended.returncode in (0, 1, 5):  # passed, failed, nothing selected
                done.touch()
                break
    if not done.exists():
        raise SystemExit(f"{file.name} ({mode}): interrupted or killed {RESTARTS} times; see {folder / file.stem}.log")


def run_all(files: list[Path], results: Path, jobs: int) -> None:
    """Run the files in both modes, the slowest first."""
    where = folders(results)
    order = sorted(files, key=lambda f: SLOWEST_FIRST.index(f.stem) if f.stem in SLOWEST_FIRST else len(SLOWEST_FIRST))
    tasks = [(file, mode, where[mode]) for file in order for mode in MODES]
    with ThreadPoolExecutor(jobs) as pool:
        for (file, mode, _), _ in zip(tasks, pool.map(lambda task: run_file(*task), tasks), strict=True):
            typer.echo(f"{file.stem} {mode}")


def outcomes(folder: Path, files: list[Path]) -> dict[str, Any]:
    """Return the last outcome of each test."""
    return {line["test"]: line for file in files for line in read_lines(folder / f"{file.stem}.jsonl")}


def main(
    results: Annotated[Path, typer.Argument(help="folder of results")],
    files: Annotated[list[str] | None, typer.Argument(help="names such as test_core; all files if left out")] = None,
    jobs: Annotated[int, typer.Option(help="files that run side by side")] = 2,
) -> None:
    """Run thunder's own tests without jointtrace's option and with it, and compare."""
    chosen = [file for file in sorted(tests_folder().glob("test_*.py")) if not files or file.stem in files]
    expected = {test: why for test, why in EXPECTED.items() if test.partition(".py::")[0] in {f.stem for f in chosen}}
    run_all(chosen, results.resolve(), jobs)
    found = compare(*(outcomes(folder, chosen) for folder in folders(results.resolve()).values()), expected)
    (results / "table.md").write_text(found.table())
    typer.echo(found.table())
    for test, became in found.regressions.items():
        typer.echo(f"REGRESSION {test}\n{became}\n")
    for test in found.stale:
        typer.echo(f"no longer a regression; remove it from expected.py: {test}")
    raise typer.Exit(not found.good)


if __name__ == "__main__":
    typer.run(main)
