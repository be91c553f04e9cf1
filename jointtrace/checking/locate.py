"""locate: find the first stage that computes something else than the one before it, and the first op in it."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from jointtrace.checking.compare import SAME_OPS, Tolerance, difference
from jointtrace.checking.interpret import flat_ops, seed
from jointtrace.checking.program import Outcome, Program, cotangents_of
from jointtrace.ir.facts import producers
from jointtrace.ir.op import Op, Tag, Var
from jointtrace.ir.text import print_op

UNSET = "empty"  # in the name of an operator that returns memory as it finds it


@dataclass(frozen=True)
class Fault:
    """The first thing that is wrong.

    Attributes:
        what, how: which output, gradient or input, and how it differs.
        stage: the pass after which it differs.
        op: the first op whose value differs; None where none does.
        note: what else is known of it.
        before, after: the program before and after the stage; before is None where the stage is the first one.
        expected: what the results should be, where there is no program before.
        region, arguments: a region that computes something else than its body, and on what.
        cotangents: by output position; None where only the forward was compared.
        drawn: the random numbers of the programs before and after.
    """

    what: str
    how: str
    stage: str
    op: Op | None
    note: str = ""
    before: Program | None = None
    after: Program | None = None
    expected: Outcome | None = None
    region: Op | None = None
    arguments: Sequence[Any] = ()
    drawn: Sequence[Mapping[str, Any]] = ({}, {})
    cotangents: Mapping[int, Any] | None = None


class Reference(Protocol):
    """What the first stage must agree with."""

    name: str
    tolerance: Tolerance
    differentiable: tuple[bool, ...] | None  # for each output whether it requires a gradient once compiled

    def run(
        self, inputs: Sequence[Any], cotangents: Mapping[int, Any] | None, drawn: Mapping[str, Any]
    ) -> Outcome | None:
        """Compute the results on the inputs of the joint trace, with the random numbers `drawn` by it.

        None where eager refuses the program, as it does some writes to what its backward needs.
        """
        ...

    def locate(self, outcome: Outcome, program: Program) -> tuple[Op | None, str]:
        """Return the first op of `program`, which gave `outcome` with its values, that differs, and a note."""
        ...


def first_fault(
    found: Sequence[Program], reference: Reference | None, inputs: Sequence[Any], cotangents: Mapping[int, Any] | None,
    labels: Sequence[str],
) -> Fault | None:
    """Compare each program with the one before it, the first with the reference, on the same inputs."""
    seeded, drawn = _draws(found, inputs)
    cotangents = None if cotangents is None else _completed(cotangents, found[0], inputs)
    random = any(Tag.RANDOM in op.tags for op in flat_ops(found[0].forward))
    last = found[0].run(inputs, cotangents, keep=random, drawn=drawn)
    if reference is not None:
        expected = reference.run(inputs, cotangents, last.values)
        wrong = expected and disagreement(last, expected, labels, reference.tolerance)
        if wrong:
            op, note = reference.locate(found[0].run(inputs, cotangents, keep=True, drawn=drawn), found[0])
            return Fault(*wrong, found[0].stage, op, note, None, found[0], expected, cotangents=cotangents)
        lost = expected and _wrong_requires_grad(expected, reference.differentiable or ())
        if lost is not None:
            what, how, position = lost
            op = producers(found[0].forward).get(getattr(found[0].forward.outputs[position], "name", ""))
            return Fault(what, how, found[0].stage, op, "", None, found[0], expected, cotangents=cotangents)
        del expected
    for position, (before, after) in enumerate(pairwise(found), start=1):
        if same_traces(before, after):
            continue
        outcome = after.run(inputs, cotangents, drawn=drawn if position < seeded else None)
        wrong = disagreement(outcome, last, labels, SAME_OPS)
        if wrong is not None:
            draws = [drawn if i < seeded else {} for i in (position - 1, position)]
            op, note = first_op(before, after, inputs, cotangents, draws)
            return Fault(*wrong, after.stage, op, note, before, after, drawn=draws, cotangents=cotangents)
        last = outcome
    return None


def _wrong_requires_grad(expected: Outcome, found: Sequence[bool]) -> tuple[str, str, int] | None:
    for position, (mine, theirs) in enumerate(zip(found, expected.requires_grad or (), strict=False)):
        if mine != theirs:
            return f"output {position}", f"requires_grad is {mine}, should be {theirs}", position
    return None


def same_traces(before: Program, after: Program) -> bool:
    """Whether a stage changed nothing."""
    return before.handed == after.handed and before.traces == after.traces


def disagreement(
    found: Outcome, expected: Outcome, labels: Sequence[str], tolerance: Tolerance
) -> tuple[str, str] | None:
    """Return which result differs, and how; None where all agree."""
    for (what, _, mine), (_, _, theirs) in zip(found.parts(labels), expected.parts(labels), strict=True):
        how = difference(mine, theirs, tolerance)
        if how is not None:
            return what, how
    return None


def _completed(cotangents: Mapping[int, Any], joint: Program, inputs: Sequence[Any]) -> Mapping[int, Any]:
    """Return `cotangents` with some for outputs whose own the last program does not read: it may be wrong not to."""
    missing = [i for i in cotangents_of(joint) if i not in cotangents]
    if not missing:
        return cotangents
    seed(0, ())
    outputs = joint.run(inputs).outputs
    return {**cotangents, **{i: torch.randn_like(outputs[i]) for i in missing}}


def _draws(found: Sequence[Program], inputs: Sequence[Any]) -> tuple[int, dict[str, Any]]:
    """Return the position of the first program that draws from seeds of its own, and what; those before take that."""
    random = {name for op in flat_ops(found[0].forward) if Tag.RANDOM in op.tags for name in op.outs}
    for position, program in enumerate(found if random else ()):
        pure = {n for op in flat_ops(program.forward) if Tag.RANDOM not in op.tags for n in op.outs} & random
        if pure:
            values = program.run(inputs, keep=True).values
            return position, {name: values[name] for name in pure if name in values}
    return 0, {}


def first_op(
    before: Program, after: Program, inputs: Sequence[Any], cotangents: Mapping[int, Any] | None,
    drawn: Sequence[Mapping[str, Any]],
) -> tuple[Op | None, str]:
    """Return the first op of `after` that makes another value than in `before`, and what is known of it."""
    expected, values = (
        p.run(inputs, cotangents, keep=True, drawn=d).values for p, d in zip((before, after), drawn, strict=True))
    known = {name: op for trace in before.traces for op in flat_ops(trace) for name in op.outs}
    for op in (op for trace in after.traces for op in flat_ops(trace)):
        for name in op.outs:
            old = counterpart(name, expected)
            if old is None or name not in values or UNSET in op.target.name:
                continue
            how = difference(values[name], expected[old], SAME_OPS)
            if how is not None:
                return op, _changed(op, name, how, known.get(old))
    return _missing_write(before, after) or _other_result(before, after, known) or (None, "no op differs")


def counterpart(name: str, expected: Mapping[str, Any]) -> str | None:
    """Return under what name the value of `name` was known before: its own, or that of what it computes again."""
    if name in expected:
        return name
    again = name.removeprefix("bw_").rstrip("_")
    return again if again != name and again in expected else None


def _changed(op: Op, name: str, how: str, before: Op | None) -> str:
    note = f"%{name}: {how}"
    if before is not None and print_op(before) != print_op(op):
        note += f"\n    before: {print_op(before)}"
    return note


def _missing_write(before: Program, after: Program) -> tuple[Op, str] | None:
    """Return a write of `before` that `after` lacks."""
    left = [(op.target.name, op.writes) for trace in after.traces for op in flat_ops(trace) if Tag.MUTATES in op.tags]
    for op in (op for trace in before.traces for op in flat_ops(trace) if Tag.MUTATES in op.tags):
        if (op.target.name, op.writes) not in left:
            return op, "this write is gone"
        left.remove((op.target.name, op.writes))
    return None


def _other_result(before: Program, after: Program, known: Mapping[str, Op]) -> tuple[Op | None, str] | None:
    """Return the op whose value is returned, or handed to the backward, in another place than before."""
    for kind, old, new in _results(before, after):
        if old != new:
            op = known.get(old.name) if isinstance(old, Var) else known.get(new.name) if isinstance(new, Var) else None
            return op, f"{kind}: {_shown(new)} is returned, before it was {_shown(old)}"
    for name, position in zip(after.backward.inputs if after.backward else (), after.handed, strict=False):
        given = after.forward.outputs[position]
        if given != Var(name):
            return known.get(name), f"the backward's %{name} is handed {_shown(given)}"
    return None


def _results(before: Program, after: Program) -> Iterator[tuple[str, Any, Any]]:
    count = before.num_outputs
    pairs = zip(before.forward.outputs[:count], after.forward.outputs[:count], strict=True)
    for position, (old, new) in enumerate(pairs):
        yield f"output {position}", old, new
    grads = [p.forward.grads if p.backward is None else p.backward.outputs for p in (before, after)]
    for position, (old, new) in enumerate(zip(*grads, strict=False)):
        yield f"gradient {position}", old, new


def _shown(leaf: Any) -> str:
    return f"%{leaf.name}" if isinstance(leaf, Var) else repr(leaf)
