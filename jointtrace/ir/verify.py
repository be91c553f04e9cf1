"""verify: refuse a trace that breaks an invariant every pass relies on.

Ensures   every value is made once, typed, and made before it is read; forward ops stand before backward ops and read
          nothing of theirs; what an op writes to is declared, and read afterwards only through that op's results;
          `get_grad` ops name the output they belong to, at most one for each position; regions are closed, of one
          device and one phase, hold no collective and no `get_grad`, and agree with the op that holds them.
Cost      one walk over the trace and over each region, O(ops + operands).
"""
from __future__ import annotations

from collections.abc import Iterator

from jointtrace.errors import VerifyError
from jointtrace.ir.facts import mutated, storage
from jointtrace.ir.op import Op, Phase, Tag, TensorType, Type, Var, leaves
from jointtrace.ir.text import print_type
from jointtrace.ir.trace import Trace

KEPT_OUT_OF_REGIONS = frozenset({Tag.COLLECTIVE, Tag.GET_GRAD})


def verify(trace: Trace, after: str = "") -> None:
    """Check every invariant of `trace`.

    Args:
        trace: a joint trace, one half of one, or the body of a region.
        after: the pass that made it, for the message.

    Raises:
        VerifyError: the first fault, with the op, its position and the pass.
    """
    try:
        _verify(trace, "")
    except VerifyError as error:
        raise VerifyError(f"after {after}: {error}" if after else str(error)) from None


def _verify(trace: Trace, where: str) -> None:
    _check_values(trace, where)
    _check_order(trace, where)
    _check_writes(trace, where)
    cotangents: dict[int, str] = {}
    for position, op in enumerate(trace.ops):
        at = _at(op, position, where)
        if Tag.GET_GRAD in op.tags:
            _check_get_grad(op, trace, cotangents, at)
        if op.body is not None:
            _check_region(op, op.body, trace, at)
        for body in _bodies(op):
            _verify(body, f"{at}, in its body, ")


def _fault(where: str, problem: str) -> VerifyError:
    return VerifyError(f"{where}: {problem}" if where else problem)


def _at(op: Op, position: int, where: str = "") -> str:
    made = f" -> {', '.join(f'%{name}' for name in op.outs)}" if op.outs else ""
    source = f" from {op.source}" if op.source else ""
    return f"{where}op {position} ({op.target.name}{made}){source}"


def _check_values(trace: Trace, where: str) -> None:
    """Single assignment, definition before use, types, results that exist."""
    defined: set[str] = set()
    for name in trace.inputs:
        _define(name, defined, trace, f"{where}input %{name}")
    for position, op in enumerate(trace.ops):
        at = _at(op, position, where)
        for name in op.ins:
            if name not in defined:
                raise _fault(at, f"reads %{name}, which nothing before it makes")
        for name in op.outs:
            _define(name, defined, trace, at)
    for kind, names in (("output", trace.output_names), ("gradient", trace.grad_names)):
        for name in names:
            if name not in defined:
                raise _fault(f"{where}{kind} %{name}", "nothing makes it")
    if trace.grads and len(trace.grads) != len(trace.inputs):
        raise _fault(f"{where}grads", f"{len(trace.grads)} of them for {len(trace.inputs)} inputs")


def _define(name: str, defined: set[str], trace: Trace, at: str) -> None:
    if name in defined:
        raise _fault(at, f"makes %{name} a second time")
    if name not in trace.types:
        raise _fault(at, f"%{name} has no type")
    defined.add(name)


def _check_order(trace: Trace, where: str) -> None:
    """All forward ops stand before all backward ops, and so read nothing that the backward makes."""
    first_backward: int | None = None
    for position, op in enumerate(trace.ops):
        if op.phase is Phase.BW and first_backward is None:
            first_backward = position
        elif op.phase is Phase.FW and first_backward is not None:
            backward = {name for earlier in trace.ops[first_backward:position] for name in earlier.outs}
            read = [f", and reads %{name}, which the backward makes" for name in op.ins if name in backward]
            problem = f"a forward op after the first backward op ({first_backward}){''.join(read[:1])}"
            raise _fault(_at(op, position, where), problem)


def _check_writes(trace: Trace, where: str) -> None:
    """Writes are declared, and what was written to is read through the results of the op that wrote.

    A write may name what an earlier one has overwritten: thunder copies each new value of a buffer onto the first name.
    """
    owner = storage(trace)
    version = dict.fromkeys(owner, 0)
    made_at = dict.fromkeys(trace.inputs, 0)
    writer = {}
    for position, op in enumerate(trace.ops):
        at = _at(op, position, where)
        if bool(op.writes) != (Tag.MUTATES in op.tags):
            raise _fault(at, "writes without the tag `mutates`" if op.writes else "tag `mutates`, but no writes")
        for name in op.ins if Tag.GET_GRAD not in op.tags else ():
            if made_at[name] != version[owner[name]] and name not in op.writes:
                raise _fault(at, f"reads %{name} after {writer[owner[name]]} has overwritten it")
        for name in op.writes:
            if name not in op.ins:
                raise _fault(at, f"writes to %{name}, which it does not read")
            version[owner[name]] += 1
            writer[owner[name]] = _at(op, position)
        made_at.update((name, version[owner[name]]) for name in op.outs)


def _check_get_grad(op: Op, trace: Trace, cotangents: dict[int, str], at: str) -> None:
    """It reads the cotangent of an output, in the backward, and one that no other op reads (`cotangents`)."""
    if op.phase is not Phase.BW:
        raise _fault(at, "reads a cotangent in the forward")
    if len(op.args) != 2 or not isinstance(op.args[0], Var) or not isinstance(op.args[1], int):
        raise _fault(at, "its arguments are not an output and its position")
    position = op.args[1]
    if not 0 <= position < len(trace.outputs) or trace.outputs[position] != op.args[0]:
        raise _fault(at, f"output {position} is not {op.args[0]!r}")
    if position in cotangents:
        raise _fault(at, f"reads the cotangent of output {position}, as {cotangents[position]} does")
    cotangents[position] = at


def _check_region(op: Op, body: Trace, trace: Trace, at: str) -> None:
    """The body takes what the op is given and returns what the op makes, and holds nothing a region must not."""
    _check_same_types(_types(op.ins, trace), _types(body.inputs, body), f"{at}: its arguments and its body's inputs")
    made = _types(body.output_names, body)
    _check_same_types(_types(op.outs, trace), made, f"{at}: its results and its body's outputs")
    written = mutated(body)
    for name, argument in zip(body.inputs, op.ins, strict=True):
        if name in written and argument not in op.writes:
            raise _fault(at, f"its body writes to %{name}, but the op does not declare to write to %{argument}")
    for position, inner in enumerate(body.ops):
        if inner.tags & KEPT_OUT_OF_REGIONS:
            raise _fault(_at(inner, position, f"{at}, in its body, "), "must not stand in a region")
    phases = {inner.phase for inner in body.ops}
    if len(phases) > 1:
        raise _fault(at, "a region over the boundary between forward and backward")
    devices = {type_.device: None for type_ in body.types.values() if isinstance(type_, TensorType)}
    if len(devices) > 1:
        raise _fault(at, f"a region over {len(devices)} devices: {', '.join(devices)}")


def _types(names: tuple[str, ...], trace: Trace) -> list[tuple[str, Type | None]]:
    return [(name, trace.types.get(name)) for name in names]


def _check_same_types(outer: list[tuple[str, Type | None]], inner: list[tuple[str, Type | None]], what: str) -> None:
    if len(outer) != len(inner):
        raise _fault(what, f"{len(outer)} and {len(inner)} values")
    for (name, type_), (inner_name, inner_type) in zip(outer, inner, strict=True):
        if type_ is None or inner_type is None:
            raise _fault(what, f"%{inner_name if type_ else name} has no type")
        if not _alike(type_, inner_type):
            raise _fault(what, f"%{name}: {print_type(type_)}, but %{inner_name}: {print_type(inner_type)}")


def _alike(outer: Type, inner: Type) -> bool:
    """Equal types; where only one of them knows strides, equal but for strides."""
    if isinstance(outer, TensorType) and isinstance(inner, TensorType) and None in (outer.strides, inner.strides):
        return (outer.shape, outer.dtype, outer.device) == (inner.shape, inner.dtype, inner.device)
    return outer == inner


def _bodies(op: Op) -> Iterator[Trace]:
    """Yield the traces an op holds: its body, and the branches among its arguments."""
    if op.body is not None:
        yield op.body
    yield from (leaf for leaf in leaves((op.args, dict(op.kwargs))) if isinstance(leaf, Trace))
