"""replay: run what a reproducer holds, and print how the results differ."""
from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from jointtrace.checking.compare import OTHER_CODE, SAME_OPS, difference
from jointtrace.checking.interpret import Interpreter, undisturbed
from jointtrace.checking.locate import disagreement, first_op
from jointtrace.checking.program import Outcome, Program
from jointtrace.errors import OptionError
from jointtrace.executors.registry import resolve
from jointtrace.ir.op import Op, Target, Var
from jointtrace.ir.text import parse, print_op
from jointtrace.ir.trace import Trace
from jointtrace.runtime.codegen import compile_trace


@dataclass(frozen=True)
class Case:
    """What a reproducer holds.

    Attributes:
        kind: `stage` (two programs differ), `first stage` (one differs from the results kept), `region` (compiled, it
            differs from its body) or `code` (generated, it returned something else than its ops compute).
        stage: the faulty stage.
        executor: what compiled the region.
        before, after: trace text, of a joint trace or of two halves.
        handed, cotangents, num_outputs: as in `Program`; `handed` of each program.
        targets: where the callables lie that the text names.
    """

    kind: str
    stage: str
    executor: str
    before: Sequence[str]
    after: Sequence[str]
    handed: Sequence[tuple[int, ...]]
    cotangents: tuple[int, ...]
    num_outputs: int
    targets: Mapping[str, str]


def show(case: Case, file: Path) -> int:
    """Print how the results differ; return 1 where they do, else 0."""
    kept = torch.load(file, weights_only=False)
    table = {name: target(name, place) for name, place in case.targets.items()}
    texts = [*case.before, *case.after]
    traces = [parse(text, {**table, **own}) for text, own in zip(texts, kept["constants"], strict=True)]
    with undisturbed(traces):
        found = {"stage": _stage, "first stage": _first_stage, "region": _region, "code": _code}[case.kind](
            case, traces, _filled(kept))
    print_ = Console(markup=False, highlight=False, soft_wrap=True).print
    for line in found or ["no difference"]:
        print_(line)
    return int(bool(found))


def target(name: str, place: str) -> Any:
    """Return the callable that lies at `place`.

    Raises:
        OptionError: nothing is known of the place.
    """
    module, _, attribute = place.partition(":")
    if not module:
        raise OptionError(f"the callable {name!r} has no importable name: say in this file where it is, as "
                          "\"module:attribute\" under `targets`")
    if module.startswith("executor "):
        from thunder.extend import get_executor

        executor = get_executor(module.removeprefix("executor "))
        assert executor is not None, module
        return _implementation(executor.opmap[attribute])
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def nothing(*args: Any) -> None:
    """Stand for a check of the caller's tensors, which a reproducer does not have."""


def _implementation(symbol: Any) -> Any:
    """Return what an operator of a thunder executor runs: thunder tells it to the symbols it binds."""
    bound = SimpleNamespace(_call_ctx=None)
    symbol._bind_postprocess(bound)
    return bound._call_ctx[symbol.name]


def _filled(kept: dict[str, Any]) -> dict[str, Any]:
    if "sizes" not in kept:
        return kept
    generator = torch.Generator().manual_seed(0)

    def make(item: Any) -> Any:
        if not (isinstance(item, tuple) and item[:1] == ("tensor",)):
            return item
        _, shape, dtype, strides = item
        values = torch.randn(shape, generator=generator)
        return torch.empty_strided(shape, strides, dtype=dtype).copy_(values)

    given = kept["cotangent_sizes"]
    return {**kept, "inputs": [make(i) for i in kept["sizes"]], "expected": None, "results": None,
            "cotangents": given and {i: make(item) for i, item in given.items()}}


def _programs(case: Case, traces: Sequence[Trace]) -> list[Program]:
    cut = len(case.before)
    sides = [side for side in (traces[:cut], traces[cut:]) if side]
    found = []
    for side, handed in zip(sides, case.handed, strict=True):
        backward = side[1] if len(side) > 1 else None
        found.append(Program(case.stage, side[0], case.num_outputs, backward, handed, case.cotangents))
    return found


def _stage(case: Case, traces: Sequence[Trace], kept: dict[str, Any]) -> list[str]:
    before, after = _programs(case, traces)
    inputs, cotangents = kept["inputs"], kept["cotangents"]
    expected, found = (p.run(inputs, cotangents, drawn=d) for p, d in zip((before, after), kept["drawn"], strict=True))
    wrong = disagreement(found, expected, _labels(before), SAME_OPS)
    if wrong is None:
        return []
    op, note = first_op(before, after, inputs, cotangents, kept["drawn"])
    return [f"{wrong[0]}: {wrong[1]}", f"first wrong after: {case.stage}", f"first op: {op and print_op(op)}", note]


def _first_stage(case: Case, traces: Sequence[Trace], kept: dict[str, Any]) -> list[str]:
    (program,) = _programs(case, traces)
    if kept["expected"] is None:
        return ["the expected results were too large to keep"]
    wrong = disagreement(program.run(kept["inputs"], kept["cotangents"]), Outcome(*kept["expected"]), _labels(program),
                         OTHER_CODE)
    return [] if wrong is None else [f"{wrong[0]}: {wrong[1]}", f"first wrong after: {case.stage}"]


def _labels(program: Program) -> list[str]:
    return [f"%{name}" for name in program.forward.inputs]


def _region(case: Case, traces: Sequence[Trace], kept: dict[str, Any]) -> list[str]:
    (body,) = traces
    (executor,) = resolve((case.executor,))
    region = Op(Target("region"), tuple(map(Var, body.inputs)), out=body.outputs, body=body)
    return _differences(body, executor.compile(region)(*kept["inputs"]), kept["inputs"])


def _code(case: Case, traces: Sequence[Trace], kept: dict[str, Any]) -> list[str]:
    (half,) = traces
    results = kept["results"] or compile_trace(half, boxed=False)(*kept["inputs"])
    return _differences(half, results, kept["inputs"])


def _differences(trace: Trace, results: Sequence[Any], inputs: Sequence[Any]) -> list[str]:
    values = dict(zip(trace.inputs, inputs, strict=True))
    Interpreter().run(trace, values, {})
    found = []
    for leaf, result in zip(trace.outputs, results, strict=True):
        how = difference(result, values[leaf.name] if isinstance(leaf, Var) else leaf, OTHER_CODE)
        if how is not None:
            found.append(f"{leaf}: {how}")
    return found
