"""dump: the traces of a compiled function as text, on demand and as they come.

With the environment variable `JOINTTRACE_DUMP` set to a folder, every compilation writes its stages to a numbered
subfolder as they come, so that they are there also when a later stage fails. Where torch keeps its structured trace
(`TORCH_TRACE`, read by tlparse), the stages of what Dynamo compiles are artifacts in it.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch._logging._internal import trace_structured  # private; torch 2.10 to 2.14

from jointtrace.errors import OptionError
from jointtrace.ir.trace import Trace

if TYPE_CHECKING:
    from jointtrace.pipeline import Stage
    from jointtrace.runtime.record import Record

VARIABLE = "JOINTTRACE_DUMP"
HALVES = ("forward", "backward")


def text_of(record: Record, stage: str) -> str:
    """Return one stage as text.

    Args:
        record: the compilation.
        stage: `joint` (as it was built), `forward`, `backward` (as they run), `all`, or the name of a pass; of a pass
            that ran twice, what it made last.

    Raises:
        OptionError: there is no such stage; the message lists those that there are.
    """
    if stage == "all":
        return "\n".join(f"# {name}\n{text}" for name, text in _texts(record))
    texts = dict(_texts(record))
    if stage not in texts:
        raise OptionError(f"no stage {stage!r}; there are: {', '.join(texts)}, all")
    return texts[stage]


def _texts(record: Record) -> Iterator[tuple[str, str]]:
    for stage in record.stages:
        if stage.name == "build_joint":
            yield "joint", str(stage.trace)
        yield stage.name, str(stage.trace)
    if record.halves is not None:
        yield "forward", str(record.halves.forward)
        yield "backward", "" if record.halves.backward is None else str(record.halves.backward)


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Write the stages that `record` gets meanwhile to the folder that `JOINTTRACE_DUMP` names, and how it ended."""
    root = os.environ.get(VARIABLE)
    if not root:
        yield
        return
    record.folder = _new_folder(Path(root), record.frontend)
    try:
        yield
    except BaseException as error:
        (record.folder / "error.txt").write_text(f"{type(error).__name__}: {error}\n")
        raise
    if record.halves is not None and record.origin is None:  # of Dynamo's each half came on its own
        for name in HALVES:
            _write(record, name, lambda name=name: text_of(record, name))


def write_program(record: Record, program: object) -> None:
    """Write the front end's own form of the program, where dumps are asked for: all there is if building fails."""
    if record.folder is not None:
        (record.folder / "program.txt").write_text(f"{program}\n")


def write_stage(record: Record, stage: Stage) -> None:
    """Write a stage that just came, where dumps are asked for."""
    _write(record, f"{len(record.stages) - 1:02d}_{stage.name}", lambda: str(stage.trace))


def write_half(record: Record, name: str, trace: Trace) -> None:
    """Write a half as it runs, where dumps are asked for."""
    _write(record, name, lambda: str(trace))


def _write(record: Record, name: str, text: Callable[[], str]) -> None:
    """Write to the record's folder and to torch's structured trace, where there are such."""
    if record.folder is not None:
        (record.folder / f"{name}.txt").write_text(text() + "\n")
    if record.origin is not None:  # Dynamo is compiling: the artifact has a place in its report
        trace_structured("artifact", lambda: {"name": f"jointtrace_{name}", "encoding": "string"}, payload_fn=text)


def _new_folder(root: Path, frontend: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    number = len(list(root.iterdir()))
    while True:  # another process may take the number first
        folder = root / f"{number:03d}_{frontend}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder
