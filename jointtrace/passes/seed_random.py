"""seed_random: random ops become seeds, drawn once, and pure functions of them.

Requires  a joint trace in dependency order. Before `recompute`, which never computes a random op again, but may compute
          a draw again from its 8 bytes of seed; after `dce`, so that nothing is seeded for a draw that nothing reads.
Ensures   same inputs and outputs; every value has the same distribution, independent of all others. Only the op
          `jointtrace.seeds`, one for each phase and device, touches random state: what is computed again from a seed is
          the same to the last bit, and no state moves for it. Random ops without a rule stay, so they are saved. A draw
          has the form that hashes positions where an executor would fuse it, else the form with a generator (see
          `ir.draw`; the note `random` says which); the op carries its form, so the two are never mixed for one value.
          After one `torch.manual_seed` two runs of one compiled program agree; two calls differ. The numbers are not
          those that eager, or the program compiled for other executors, would draw.
Cost      one walk, O(ops + operands).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import torch

from jointtrace.ir.aten import tags_of
from jointtrace.ir.draw import counter_draws
from jointtrace.ir.op import Op, Phase, ScalarType, Tag, Target, TensorType, Type, Var, leaves
from jointtrace.ir.trace import Trace
from jointtrace.passes._random_rules import rule_of

Fused = Callable[[Op, Mapping[str, Type]], bool]
HOST = "cpu"

draws = torch.ops.jointtrace


def seed_random(trace: Trace, *, fused: Fused) -> Trace:
    """Return `trace` with every random op that has a rule written as draws from seeds.

    `fused` says of an op, given the types of its values, whether an executor would compile it with others.
    """
    maker = _Maker(trace, fused)
    for op in trace.ops:
        maker.add(op)
    if not maker.seeds:
        return trace.rebuild(trace.ops, by="seed_random")
    notes = {**trace.notes, "random": ", ".join(sorted(maker.forms))}
    return trace.rebuild(maker.with_seeds(), by="seed_random", types=maker.types, notes=notes)


@dataclass
class _Seeds:
    """Seeds drawn together, right before the op at position `start`."""

    start: int
    names: list[str] = field(default_factory=list)


class _Maker:
    """Writes the new ops; a `Builder` of rules for the op at hand."""

    def __init__(self, trace: Trace, fused: Fused) -> None:
        self.fused = fused
        self.types: dict[str, Type] = dict(trace.types)
        self.ops: list[Op] = []
        self.seeds: dict[tuple[Phase, str], _Seeds] = {}
        self.forms: set[str] = set()

    def add(self, op: Op) -> None:
        """Write `op`, as its rule has it where there is one."""
        found = rule_of(op) if Tag.RANDOM in op.tags and Tag.CLAIMED not in op.tags else None
        result = next((self.types[name] for name in op.outs), None)
        self.op, self.start = op, len(self.ops)
        made = None
        if found is not None and isinstance(result, TensorType) and _drawable(found[1]):
            self.args = found[1]
            self.sizes = self._sizes(result)
            made = found[0](self.args, result, self) if self.sizes is not None else None
        if made is None:
            del self.ops[self.start :]
            self.ops.append(op)
            return
        pairs = zip(leaves(made), leaves(op.out), strict=True)
        wanted = {new.name: old.name for new, old in pairs if isinstance(old, Var)}
        self.ops[self.start :] = [new.rename_inputs(wanted).rename_outputs(wanted) for new in self.ops[self.start :]]

    def draw(self, kind: str, type_: TensorType, *, p: float = 1.0) -> Var:
        """Write a draw and name its seed."""
        order, device = _order(type_), torch.device(type_.device)
        options = {"p": float(p)} if kind == "bernoulli" else {}
        options |= {"dtype": type_.dtype, "device": device} | ({"order": order} if order else {})
        seed = self.fresh("seed", TensorType((), torch.int64, type_.device, ()))
        args, where = (seed, self.sizes, kind), type_.device
        form, name = draws.counter_draw.default, "counter"
        if not counter_draws(kind, type_.dtype) or not self._fusible(form, args, options, type_):
            form, name, where = draws.generator_draw.default, "generator", HOST
            self.types[seed.name] = TensorType((), torch.int64, HOST, ())
        self.forms.add(name)
        self.seeds.setdefault((self.op.phase, where), _Seeds(self.start)).names.append(seed.name)
        return self.call(form, *args, type_=type_, **options)

    def call(self, overload: Any, *args: Any, type_: Type, **kwargs: Any) -> Var:
        """Write a call of a pure operator; its place in the user's program is that of the random op."""
        out = self.fresh(self.op.outs[0], type_)
        op, tags = self.op, tags_of(overload) | (self.op.tags - {Tag.RANDOM})
        self.ops.append(Op(Target(str(overload), overload), args, kwargs, out, tags, op.phase, source=op.source))
        return out

    def fresh(self, name: str, type_: Type) -> Var:
        """Return a new value."""
        names = chain((name,), (f"{name}_{i}" for i in count(1)))
        name = next(n for n in names if n not in self.types)
        self.types[name] = type_
        return Var(name)

    def with_seeds(self) -> list[Op]:
        """Return all ops, with the seeds before those that read them."""
        ops, overload = list(self.ops), draws.seeds.default
        target, tags = Target(str(overload), overload), tags_of(overload)
        for (phase, device), seeds in sorted(self.seeds.items(), key=lambda item: -item[1].start):
            args = (len(seeds.names), torch.device(device))
            ops.insert(seeds.start, Op(target, args, {}, [*map(Var, seeds.names)], tags, phase))
        return ops

    def _fusible(self, form: Any, args: tuple[Any, ...], options: dict[str, Any], type_: TensorType) -> bool:
        op = Op(Target(str(form), form), args, options, Var("drawn"), tags_of(form))
        return self.fused(op, {**self.types, "drawn": type_})

    def _sizes(self, result: TensorType) -> list[Any] | None:
        """Return the sizes of the result as arguments; None where an unknown one is neither given nor some tensor's."""
        given = next((self.args[name] for name in ("size", "shape") if name in self.args), None)
        if given is not None:
            return list(given)
        like = next((name for name in self.op.ins if getattr(self.types[name], "shape", None) == result.shape), "")
        if not like and not all(isinstance(size, int) for size in result.shape):
            return None
        return [size if isinstance(size, int) else self._size(like, dim) for dim, size in enumerate(result.shape)]

    def _size(self, tensor: str, dim: int) -> Var:
        return self.call(torch.ops.aten.sym_size.int, Var(tensor), dim, type_=ScalarType("int"))


def _drawable(args: Mapping[str, Any]) -> bool:
    return args.get("generator") is None and not args.get("pin_memory") and args.get("layout") in (None, torch.strided)


def _order(type_: TensorType) -> list[int]:
    """Return the dimensions by falling stride, or nothing where that is their order."""
    strides = list(map(int, type_.strides or ()))
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    return order if order != list(range(len(strides))) else []
