"""execution: compare what the compiled code returned with what its half computes op by op.

The half is run with its compiled regions, from the state of the generators in which the code ran, so that both draw
the same random numbers. Each region without random numbers is compared with its own body on the way.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jointtrace.checking.compare import OTHER_CODE, difference
from jointtrace.checking.interpret import Interpreter, bound, copies, flat_ops, has_effects
from jointtrace.checking.locate import Fault
from jointtrace.checking.program import Program
from jointtrace.ir.op import Op, Tag, Var
from jointtrace.ir.trace import Trace
from jointtrace.regions.fuse import executor_of

CODEGEN = "generated code"


class WrongRegion(Exception):
    """A region that computes something else than its body; holds the fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.what)
        self.fault = fault


def execution_fault(
    half: Trace, args: Sequence[Any], results: Sequence[Any], name_of: Callable[[int], str]
) -> Fault | None:
    """Compare `results` with those of the linked `half` on `args`; `name_of` says what a result is by its position."""
    args = copies(args) if has_effects(half) else args
    values = dict(zip(half.inputs, args, strict=True))
    try:
        Interpreter(seeded=False, region=run_region).run(half, values, {})
    except WrongRegion as found:
        return found.fault
    makers = {name: op for op in half.ops for name in op.outs}
    for position, (leaf, result) in enumerate(zip(half.outputs, results, strict=True)):
        how = difference(result, values[leaf.name] if isinstance(leaf, Var) else leaf, OTHER_CODE)
        if how is not None:
            op = makers.get(leaf.name) if isinstance(leaf, Var) else None
            program = Program(CODEGEN, half, len(half.outputs))
            return Fault(name_of(position), how, CODEGEN, op, "", None, program)
    return None


def run_region(region: Op, args: tuple[Any, ...]) -> Sequence[Any]:
    """Run a compiled region, and compare it with its body where that draws no random numbers.

    Raises:
        WrongRegion: they differ.
    """
    assert region.target.fn is not None
    body = region.body
    assert body is not None
    made = region.target.fn(*args)
    if Tag.RANDOM in region.tags or any(Tag.RANDOM in op.tags for op in flat_ops(body)):
        return made
    values = dict(zip(body.inputs, args, strict=True))
    Interpreter().run(body, values, {})
    makers = {name: op for op in body.ops for name in op.outs}
    for (name, value), leaf in zip(bound(region.out, made), body.outputs, strict=True):
        how = difference(value, values[leaf.name], OTHER_CODE)
        if how is not None:
            executor = executor_of(region)
            what = f"result %{name} of region {region.target.name}"
            note = f"region {region.target.name}, compiled by {executor}, computes something else than its body"
            raise WrongRegion(Fault(what, how, f"executor {executor}", makers.get(leaf.name), note, region=region,
                                    arguments=args))
    return made
