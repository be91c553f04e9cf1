"""dump: the traces of a compiled function as text, on demand and as they come.

With the environment variable `JOINTTRACE_DUMP` set to a folder, every compilation writes its stages to a numbered
subfolder as they come, so that they are there also when a later stage fails.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jointtrace.errors import OptionError

if TYPE_CHECKING:
    from jointtrace.pipeline import Stage
    from jointtrace.runtime.record import Record

VARIABLE = "JOINTTRACE_DUMP"


def text_of(record: Record, stage: str) -> str:
    """Return one stage as text.

    Args:
        record: the compilation.
        stage: `joint` (as it was built), `forward`, `backward` (as they run), `all`, or the name of a pass.

    Raises:
        OptionError: there is no such stage; the message lists those that there are.
    """
    texts = dict(_texts(record))
    if stage == "all":
        return "\n".join(f"# {name}\n{text}" for name, text in texts.items())
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
    for name in ("forward", "backward"):
        (record.folder / f"{name}.txt").write_text(text_of(record, name) + "\n")


def write_stage(record: Record, stage: Stage) -> None:
    """Write a stage that just came, where dumps are asked for."""
    if record.folder is not None:
        (record.folder / f"{len(record.stages) - 1:02d}_{stage.name}.txt").write_text(f"{stage.trace}\n")


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
