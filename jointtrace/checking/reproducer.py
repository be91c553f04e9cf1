"""reproducer: write a Python file that shows a fault when run, with nothing but jointtrace and torch.

It holds the traces before and after the faulty stage as text. The tensors lie in a file next to it, or, where they are
many, are made anew of a seed.
"""
from __future__ import annotations

import importlib
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from jointtrace.checking.interpret import flat_ops
from jointtrace.checking.locate import Fault
from jointtrace.checking.program import Program
from jointtrace.ir.text import constants, print_op
from jointtrace.ir.trace import Trace
from jointtrace.regions.fuse import executor_of

VARIABLE = "JOINTTRACE_DUMP"
MOST_SAVED_BYTES = 256 * 2**20

SCRIPT = '''"""{title}"""
from pathlib import Path

from jointtrace.checking.replay import Case, show

CASE = Case(
    kind={kind!r},
    stage={stage!r},
    executor={executor!r},
    before={before},
    after={after},
    handed={handed!r},
    cotangents={cotangents!r},
    num_outputs={num_outputs!r},
    targets={targets},
)
raise SystemExit(show(CASE, Path(__file__).with_suffix(".pt")))
'''


def write_reproducer(
    fault: Fault, folder: Path | None, inputs: Sequence[Any], results: Sequence[Any]
) -> Path:
    """Write the file and return its path: in `folder`, where `JOINTTRACE_DUMP` says, or in a new temporary folder.

    Args:
        fault: what was found.
        folder: the folder of the compilation.
        inputs: those of the joint trace, or of the half that ran.
        results: what the code that ran returned.
    """
    root = folder or _root()
    root.mkdir(parents=True, exist_ok=True)
    number = len(list(root.glob("check_*.py")))
    path = root / f"check_{number}.py"
    before, after, kind = _sides(fault)
    traces = [t for t in (*before, *after)]
    program = fault.after or Program("", after[0], len(after[0].outputs))
    path.write_text(SCRIPT.format(
        title=_title(fault), kind=kind, stage=fault.stage,
        executor=executor_of(fault.region) if fault.region is not None else "",
        before=_texts(before), after=_texts(after), handed=_handed(fault), cotangents=program.cotangents,
        num_outputs=program.num_outputs, targets=_listed({n: w for t in traces for n, w in _targets(t).items()}),
    ))
    given = list(fault.arguments) if fault.region is not None else list(inputs)
    expected = fault.expected and (fault.expected.outputs, fault.expected.grads, fault.expected.inputs)
    torch.save(_small({
        "inputs": given, "cotangents": fault.cotangents, "expected": expected, "results": list(results),
        "drawn": [dict(drawn) for drawn in fault.drawn],
        "constants": [{name: _picklable(value) for name, value in constants(t).items()} for t in traces],
    }), path.with_suffix(".pt"))
    return path


def _root() -> Path:
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(tempfile.mkdtemp(prefix="jointtrace_check_"))


def _title(fault: Fault) -> str:
    op = "" if fault.op is None else f"\n\nFirst op that differs: {print_op(fault.op)}"
    text = f"{fault.what} differs: {fault.how}\n\nFirst wrong after: {fault.stage}{op}\n"
    return text.replace("\\", "\\\\").replace('"', "'")


def _sides(fault: Fault) -> tuple[tuple[Trace, ...], tuple[Trace, ...], str]:
    """Return the traces before and after, and what is wrong: a stage, the first stage, a region or generated code."""
    if fault.region is not None:
        assert fault.region.body is not None
        return (), (fault.region.body,), "region"
    assert fault.after is not None
    if fault.before is not None:
        return fault.before.traces, fault.after.traces, "stage"
    return (), fault.after.traces, "first stage" if fault.expected is not None else "code"


def _handed(fault: Fault) -> tuple[tuple[int, ...], ...]:
    return tuple(p.handed for p in (fault.before, fault.after) if p is not None)


def _texts(traces: Sequence[Trace]) -> str:
    return "[" + ", ".join('r"""\n' + str(trace).replace('"""', "'''") + '\n"""' for trace in traces) + "]"


def _targets(trace: Trace) -> dict[str, str]:
    """Return where each target lies that trace text does not lead to."""
    found: dict[str, str] = {}
    for op in flat_ops(trace):
        if op.target.fn is not None and str(op.target.fn) != op.target.name:
            found[op.target.name] = place_of(op.target.name, op.target.fn)
    return found


def place_of(name: str, fn: Callable[..., Any]) -> str:
    """Return where to import a callable from, as `module:attribute`; an empty string where that is not known."""
    if isinstance(fn, torch._ops.OpOverload):
        return f"torch:ops.{fn!s}"
    if name == "jointtrace.check_apart":
        return "jointtrace.checking.replay:nothing"
    module, attribute = getattr(fn, "__module__", None) or "", getattr(fn, "__qualname__", "")
    places = [f"{module}:{attribute}", f"thunder:{name}"]
    head, _, tail = name.rpartition(".")
    short = getattr(fn, "__name__", "")
    places += [f"{head}:{tail}", f"torch:{name}"]
    places += [f"{owner}{short}" for owner in ("torch:", "torch:Tensor.", "torch.nn.functional:")]
    return next((place for place in places if _found_at(place) is fn), "") or _operator_place(name, fn)


def _found_at(place: str) -> Any:
    module, _, attribute = place.partition(":")
    try:
        found: Any = importlib.import_module(module) if module else None
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found


def _operator_place(name: str, fn: Callable[..., Any]) -> str:
    from thunder.extend import get_executor

    executor, _, operator = name.rpartition(".")
    known = get_executor(executor)
    return f"executor {executor}:{operator}" if known is not None and operator in known.opmap else ""


def _listed(table: Mapping[str, str]) -> str:
    return "{" + "".join(f"\n        {name!r}: {place!r}," for name, place in table.items()) + "\n    }"


def _picklable(value: Any) -> Any:
    """Return what can be saved of a constant: itself, or its printed form where it is an object of a session."""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return repr(value)
    return value


def _small(contents: dict[str, Any]) -> dict[str, Any]:
    """Return what to save: sizes instead of tensors where those are too many."""
    tensors = [t for t in tree_leaves(contents) if isinstance(t, torch.Tensor)]
    if sum(t.numel() * t.element_size() for t in tensors) <= MOST_SAVED_BYTES:
        return tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), contents)
    sizes = tree_map_only(
        torch.Tensor, lambda t: ("tensor", tuple(t.shape), t.dtype, tuple(t.stride())), contents["inputs"])
    given = contents["cotangents"] and {
        i: ("tensor", tuple(t.shape), t.dtype, tuple(t.stride())) for i, t in contents["cotangents"].items()}
    return {"sizes": sizes, "cotangent_sizes": given, "constants": contents["constants"],
            "drawn": [{}, {}]}
