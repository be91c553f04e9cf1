"""Judge keys in worker processes: one that hangs or dies costs its key alone."""
from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import TimeoutError as AnswerTimeoutError
from concurrent.futures import as_completed
from typing import Any

import torch
from conformance.ops import results
from conformance.ops.judge import judge
from pebble import ProcessExpired, ProcessPool
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS = 300  # for one operator, dtype and front end
TASKS_OF_A_WORKER = 400  # then it ends, and with it what torch and thunder cached


def set_up_worker() -> None:
    """Prepare a worker process: one thread, so that workers do not wait for each other's cores."""
    torch.set_num_threads(1)


def judge_in_worker(key: results.Key, count: int) -> dict[str, Any]:
    """Judge one key in a worker process."""
    return judge(*key, count).row()


def crash(key: results.Key, reason: str) -> dict[str, Any]:
    """Return the row of a key that gave no answer."""
    op, dtype, front = key
    return {"op": op, "dtype": dtype, "front": front, "verdict": "crash", "passed": 0, "samples": 0, "reason": reason}


def judge_all(keys: Sequence[results.Key], samples: int, state: str, workers: int, console: Console) -> None:
    """Judge `keys` in worker processes, at most `samples` of each, half in float64; write each row as it comes."""
    columns = (TextColumn("{task.description:>45.45}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())
    context = multiprocessing.get_context("spawn")
    with Progress(*columns, console=console) as progress, ProcessPool(
            workers, TASKS_OF_A_WORKER, set_up_worker, context=context) as pool:
        bar = progress.add_task("", total=len(keys))
        futures = {pool.schedule(judge_in_worker, args=(key, _count(key, samples)), timeout=SECONDS): key
                   for key in keys}
        for future in as_completed(futures):
            row = _row(future, futures[future])
            results.write([row], state)
            progress.update(bar, advance=1, description=f"{row['op']} {row['dtype']} {row['front']}")
            if row["verdict"] in ("wrong", "crash"):
                console.print(f"{row['verdict']}: {row['op']} {row['dtype']}, {row['front']}: {row['reason']}",
                              markup=False, highlight=False)


def _count(key: results.Key, samples: int) -> int:
    if key[2] in results.COMPILING:
        return 1
    return samples if key[1] == "float32" else max(1, samples // 2)


def _row(future: Any, key: results.Key) -> dict[str, Any]:
    try:
        return future.result()
    except AnswerTimeoutError:
        return crash(key, f"no answer in {SECONDS} s")
    except ProcessExpired as error:
        return crash(key, f"the process died: {error}")
