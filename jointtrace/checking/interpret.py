"""interpret: run a trace op by op, as plain torch code.

A RANDOM op draws from a seed made of the name of what it makes: a draw is the same in every stage that has it, and one
taken for another, or drawn twice under another name, shows.
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from jointtrace.ir.op import Op, Phase, Tag, Var, leaves, map_leaves
from jointtrace.ir.trace import Trace

EFFECTS = frozenset({Tag.MUTATES, Tag.OPAQUE})
Region = Callable[[Op, tuple[Any, ...]], Sequence[Any]]


@dataclass(frozen=True)
class Interpreter:
    """How to run ops.

    Attributes:
        seeded: draw from seeds by name; else from the generators as they are.
        keep: keep every value, as it was when it was made; else results are read when all has run, and memory is freed.
        region: what runs an op with a body; by default its body is run.
        drawn: what a RANDOM op makes, by name; one that is not there draws.
    """

    seeded: bool = True
    keep: bool = False
    region: Region | None = None
    drawn: Mapping[str, Any] = field(default_factory=dict)

    def run(self, trace: Trace, values: dict[str, Any], cotangents: Mapping[int, Any] | None = None) -> dict[str, Any]:
        """Run `trace` on `values` (its inputs by name), which it adds to; return the values as they were when made.

        Without `cotangents` (by output position) only forward ops run.
        """
        made: dict[str, Any] = {}
        copies = self.keep and has_effects(trace)
        dying = {} if self.keep else _last_uses(trace)
        if self.keep:
            made.update((name, _copied(values[name], copies)) for name in trace.inputs)
        for position, op in enumerate(trace.ops):
            if op.phase is Phase.BW and cotangents is None:
                break
            if Tag.GET_GRAD in op.tags:
                result = cotangents[op.args[1]] if cotangents else None
            else:
                result = self.call(op, values, made)
            for name, value in bound(op.out, result):
                values[name] = value
                if self.keep:
                    made[name] = _copied(value, copies)
            for name in dying.get(position, ()):
                del values[name]
        return made

    def call(self, op: Op, values: Mapping[str, Any], made: dict[str, Any]) -> Any:
        """Run one op."""
        args, kwargs = map_leaves(lambda leaf: values[leaf.name] if isinstance(leaf, Var) else leaf,
                                  (op.args, dict(op.kwargs)))
        if op.body is not None and self.region is not None:
            return self.region(op, args)
        if op.body is not None:
            inner = dict(zip(op.body.inputs, leaves((args, kwargs)), strict=True))
            made.update(self.run(op.body, inner, {}))
            return [inner[leaf.name] if isinstance(leaf, Var) else leaf for leaf in op.body.outputs]
        assert op.target.fn is not None, f"{op.target.name} has nothing to call"
        if Tag.RANDOM in op.tags and not op.writes and op.outs and self.drawn.keys() >= set(op.outs):
            return map_leaves(lambda leaf: self.drawn[leaf.name].clone() if isinstance(leaf, Var) else leaf, op.out)
        if self.seeded and Tag.RANDOM in op.tags:
            seed(zlib.crc32((op.outs or op.writes)[0].encode()), (args, kwargs))
        return op.target.fn(*args, **kwargs)


def has_effects(trace: Trace) -> bool:
    """Whether running `trace` may change what it is given."""
    return any(op.tags & EFFECTS or (op.body is not None and has_effects(op.body)) for op in trace.ops)


def flat_ops(trace: Trace) -> Iterator[Op]:
    """Yield the ops of a trace with those of its regions in their stead."""
    for op in trace.ops:
        if op.body is not None and not op.writes:
            yield from flat_ops(op.body)
        else:
            yield op


def bound(out: Any, result: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that an op made, with their names."""
    if isinstance(out, Var):
        yield out.name, result
    elif isinstance(out, (tuple, list)):
        for item, value in zip(out, result, strict=True):
            yield from bound(item, value)
    elif isinstance(out, dict):
        for key, item in out.items():
            yield from bound(item, result[key])


def seed(number: int, arguments: Any) -> None:
    """Seed the generators that a call with `arguments` may draw from."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    for generator in leaves(arguments):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(number)


def generator_states(traces: Iterable[Trace] = ()) -> Callable[[], None]:
    """Return a function that sets all generators, those named in `traces` included, back to where they are now."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    found = {id(leaf): leaf for trace in traces for op in flat_ops(trace)
             for leaf in leaves((op.args, dict(op.kwargs))) if isinstance(leaf, torch.Generator)}
    own = [(generator, generator.get_state()) for generator in found.values()]

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        for generator, state in own:
            generator.set_state(state)

    return restore


@contextmanager
def undisturbed(traces: Iterable[Trace] = ()) -> Iterator[None]:
    """Run what is inside without autograd and autocast, and leave the generators as they were."""
    restore = generator_states(traces)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        restore()


def copies(values: Sequence[Any]) -> list[Any]:
    """Return copies of tensors, of the same strides; those that share memory still do. Other values stay."""
    bases: dict[tuple[int, torch.device], torch.Tensor] = {}
    return [_copy(value, bases) if isinstance(value, torch.Tensor) else value for value in values]


def _copy(tensor: torch.Tensor, bases: dict[tuple[int, torch.device], torch.Tensor]) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return tensor.detach().clone()
    storage = tensor.untyped_storage()
    key = (storage.data_ptr(), tensor.device)
    if key not in bases:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        bases[key] = flat.set_(storage, 0, (storage.nbytes(),), (1,)).clone()
    copied = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copied.set_(bases[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _copied(value: Any, wanted: bool) -> Any:
    return value.detach().clone() if wanted and isinstance(value, torch.Tensor) else value


def _last_uses(trace: Trace) -> dict[int, list[str]]:
    """Return by position the values that nothing reads later, results and inputs left out."""
    last: dict[str, int] = {}
    for position, op in enumerate(trace.ops):
        last.update(dict.fromkeys((*op.ins, *op.outs), position))
    kept = {*trace.inputs, *trace.output_names, *trace.grad_names}
    dying: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in kept:
            dying.setdefault(position, []).append(name)
    return dying
