"""What it costs to save a value for the backward, and what must not be saved."""
from __future__ import annotations

from jointtrace.errors import UnsupportedError
from jointtrace.ir.facts import SHARING, nbytes
from jointtrace.ir.facts import storage as storage_of
from jointtrace.ir.op import Op, Phase, Tag, TensorType
from jointtrace.ir.trace import Trace
from jointtrace.passes._storage import written

HELD = 1  # cost of what the caller keeps alive anyway: not 0, so that fewer values win


def saved(trace: Trace) -> tuple[str, ...]:
    """Return the names of the inputs and forward values that the backward or its results read, in trace order."""
    read = {n for op in trace.ops if op.phase is Phase.BW and Tag.GET_GRAD not in op.tags for n in op.ins}
    read.update(trace.grad_names)
    forward = dict.fromkeys(trace.inputs)
    for op in trace.ops[: trace.boundary]:
        forward.update(dict.fromkeys(op.outs))
    return tuple(name for name in forward if name in read)


def save_costs(trace: Trace) -> dict[str, int]:
    """Return for every forward value the bytes that saving it keeps alive.

    A view keeps its whole base alive and is free to compute again from it, so it costs a little more than its base.
    What shares memory with an input or an output costs `HELD`, unless the trace writes to that memory: the next call
    may write to it before this backward runs.
    """
    storage = storage_of(trace)
    sizes, depths = _sizes(trace)
    unstable = written(trace.ops, storage)
    held: dict[str, int] = {}
    for name in (*trace.inputs, *trace.output_names):
        if storage[name] not in unstable and name in sizes:
            held[storage[name]] = max(held.get(storage[name], 0), sizes[name])
    # a reshape that has to copy, as after an expand, is larger than what it is a view of
    return {
        name: depths[name] + (HELD if size <= held.get(storage[name], 0) else size) for name, size in sizes.items()
    }


def _sizes(trace: Trace) -> tuple[dict[str, int], dict[str, int]]:
    """Return for every forward value the bytes it keeps alive, and how many views lie between it and its base."""
    sizes = {name: _size(trace, name) for name in trace.inputs}
    depths = dict.fromkeys(trace.inputs, 0)
    for op in trace.ops[: trace.boundary]:
        base = None
        if op.tags & SHARING:
            base = next((name for name in op.ins if isinstance(trace.types[name], TensorType)), None)
        for name in op.outs:
            sizes[name] = max(_size(trace, name), sizes[base] if base else 0)
            depths[name] = depths[base] + 1 if base else 0
    return sizes, depths


def _size(trace: Trace, name: str) -> int:
    return max(HELD, nbytes(trace.types[name]))


def check_overwritten(trace: Trace) -> None:
    """Raise where the backward reads, or returns, a forward value that the forward has overwritten by then.

    Raises:
        UnsupportedError: names the reader, the writer and their lines.
    """
    forward = trace.ops[: trace.boundary]
    storage = storage_of(trace)
    last_write = written(forward, storage)
    if not last_write:
        return
    made = dict.fromkeys(trace.inputs, -1)
    made.update((name, position) for position, op in enumerate(forward) for name in op.outs)
    backward = (op for op in trace.ops[trace.boundary :] if Tag.GET_GRAD not in op.tags)
    reads = [(f"the backward's {_where(op)} reads it", name) for op in backward for name in op.ins]
    reads += [("it is returned as a gradient", name) for name in trace.grad_names]
    for what_then, name in reads:
        position = last_write.get(storage[name], -1)
        if position > made.get(name, len(forward)):
            writer = _where(forward[position])
            raise UnsupportedError(
                f"%{name} is saved for the backward, but overwritten in place: {writer} writes to it, "
                f"then {what_then}; write to a clone of it, or use the operation that is not in place"
            )


def _where(op: Op) -> str:
    return f"{op.target.name} at {op.source}" if op.source else op.target.name
