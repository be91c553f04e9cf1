"""What was judged so far, as JSON lines; each line says of which source it is."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from conformance.ops.judge import FRONTS
from conformance.ops.samples import DTYPES, differentiable, has_gradient

ROOT = Path(__file__).parents[3]
FILE = ROOT / ".conformance" / "ops.jsonl"
NOT_JUDGING = frozenset({"expected.py", "table.py", "__main__.py", "results.py", "workers.py"})  # no verdict is theirs
COMPILING = tuple(name for name in FRONTS if "," in name)  # Inductor takes seconds for each call
COMPILED_BY_INDUCTOR = (
    "addmm", "cumsum", "linalg.inv", "nn.functional.conv2d", "nn.functional.cross_entropy", "sort",
)

Key = tuple[str, str, str]  # operator, dtype, front end
Row = dict[str, Any]


def tasks() -> Iterator[Key]:
    """Yield what there is to judge; the sample for Inductor, which takes longest, comes last."""
    plain = [name for name in FRONTS if name not in COMPILING]
    ops = differentiable()
    for name, op in ops.items():
        for dtype in DTYPES:
            if has_gradient(op, DTYPES[dtype]):
                yield from ((name, dtype, front) for front in plain)
    yield from ((name, "float32", front) for name in COMPILED_BY_INDUCTOR for front in COMPILING)


def source_state() -> str:
    """Return a digest of all that a verdict depends on."""
    digest = hashlib.sha256(f"{version('torch')} {version('lightning-thunder')}".encode())
    folders = (ROOT / "jointtrace", ROOT / "executors", Path(__file__).parent)
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        if path.name not in NOT_JUDGING and not path.name.startswith("test_"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read(state: str | None, file: Path = FILE) -> dict[Key, Row]:
    """Return the latest row of each key; with `state`, only those of that source."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]  # a cut line is left out
    return {(r["op"], r["dtype"], r["front"]): r for r in rows if state is None or r["state"] == state}


def write(rows: Iterable[Row], state: str, file: Path = FILE) -> None:
    """Append rows."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as out:
        out.writelines(json.dumps({**row, "state": state}) + "\n" for row in rows)
