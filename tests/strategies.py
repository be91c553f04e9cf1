"""Generated joint traces that can be run, the interpreter that runs them, and the comparison every pass test rests on.

    @given(traces())
    def test_cse_keeps_the_meaning(trace):
        assert_same_meaning(trace, cse(trace))
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from jointtrace.ir.aten import tags_of, writes_of
from jointtrace.ir.op import Op, Phase, Source, Tag, Target, TensorType, Var, leaves, map_leaves
from jointtrace.ir.trace import Trace

aten = torch.ops.aten
SHAPES = ((2, 3), (3, 2), (3, 3), (3,), ())
WIDER = {torch.float32: torch.float64, torch.float64: torch.float32}
UNARY = (aten.sin.default, aten.neg.default, aten.sigmoid.default, aten.relu.default)
BINARY = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor)
GET_GRAD = Target("get_grad")


# Running

def run(trace: Trace, inputs: Sequence[Any], cotangents: Sequence[Any] = ()) -> tuple[list[Any], list[Any]]:
    """Run `trace` op by op and return its outputs and its grads.

    Writes to `inputs` where the trace does: give each run its own (`sample_inputs`). `cotangents` has one entry per
    output. A RANDOM op draws from a seed made of its output's name, so that one draw taken for another, or drawn twice
    under another name, shows in the results, and a dead draw that is dropped does not.
    """
    values = dict(zip(trace.inputs, inputs, strict=True))

    def read(leaf: Any) -> Any:
        return values[leaf.name] if isinstance(leaf, Var) else leaf

    for op in trace.ops:
        if Tag.GET_GRAD in op.tags:
            result = cotangents[op.args[1]]
        else:
            result = _call(op, map_leaves(read, op.args), map_leaves(read, dict(op.kwargs)))
        _bind(op.out, result, values)
    return [read(leaf) for leaf in trace.outputs], [read(leaf) for leaf in trace.grads]


def _call(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if op.body is not None and op.target.fn is None:
        outputs, _ = run(op.body, list(leaves((args, kwargs))))
        return outputs if isinstance(op.out, (tuple, list)) else outputs[0]
    assert op.target.fn is not None, f"{op.target.name} has nothing to call"
    if Tag.RANDOM not in op.tags:
        return op.target.fn(*args, **kwargs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(op.outs[0].encode()))
        return op.target.fn(*args, **kwargs)


def _bind(out: Any, result: Any, values: dict[str, Any]) -> None:
    if isinstance(out, Var):
        values[out.name] = result
    elif isinstance(out, (tuple, list)):
        for item, value in zip(out, result, strict=True):
            _bind(item, value, values)


def sample_inputs(trace: Trace, seed: int = 0) -> list[torch.Tensor]:
    """Return fresh tensors for the inputs of `trace`, the same for the same seed."""
    return [_sample(trace.types[name], seed, f"input {i}") for i, name in enumerate(trace.inputs)]


def sample_cotangents(trace: Trace, seed: int = 0) -> list[torch.Tensor | None]:
    """Return one cotangent per output of `trace`, None where the output is a constant or holds integers."""
    differentiable = [isinstance(leaf, Var) and trace.types[leaf.name].dtype.is_floating_point
                      for leaf in trace.outputs]
    return [_sample(trace.types[leaf.name], seed, f"cotangent {i}") if differentiable[i] else None
            for i, leaf in enumerate(trace.outputs)]


def _sample(type_: Any, seed: int, what: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {what}".encode()))
    return torch.randn(type_.shape, dtype=type_.dtype, generator=generator)


def assert_same_meaning(before: Trace, after: Trace, seed: int = 0) -> None:
    """Assert that two traces give equal outputs, grads and written inputs, and outputs that share memory alike."""
    results = []
    for trace in (before, after):
        inputs = sample_inputs(before, seed)
        outputs, grads = run(trace, inputs, sample_cotangents(before, seed))
        results.append((outputs, grads, inputs, _sharing([*outputs, *inputs])))
    (outputs, grads, inputs, sharing), (new_outputs, new_grads, new_inputs, new_sharing) = results
    torch.testing.assert_close(new_outputs, outputs, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(new_grads, grads, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(new_inputs, inputs, rtol=0, atol=0, equal_nan=True)
    assert new_sharing == sharing, "outputs share memory with each other or with inputs as they did not before"


def _sharing(values: list[Any]) -> list[int]:
    """Return for each tensor the position of the first one that shares its storage."""
    owners = [v.untyped_storage().data_ptr() if isinstance(v, torch.Tensor) else None for v in values]
    return [owners.index(owner) for owner in owners]


# Building by hand

def call(
    overload: Any, *args: Any, out: Any, phase: Phase = Phase.FW, source: Source | None = None, **kwargs: Any
) -> Op:
    """Return the op of a torch operator, with the tags and writes its schema gives."""
    tags, writes = tags_of(overload), writes_of(overload, args, kwargs)
    return Op(Target(str(overload), overload), args, kwargs, out, tags, phase, writes, source)


def get_grad(output: str, position: int, out: str) -> Op:
    """Return the op that reads the cotangent of output `position`."""
    return Op(GET_GRAD, (Var(output), position), out=Var(out), tags=frozenset({Tag.GET_GRAD}), phase=Phase.BW)


# Generating

@st.composite
def traces(draw: st.DrawFn, max_ops: int = 12, writes: bool = True, random: bool = True) -> Trace:
    """Generate a valid joint trace over aten operators that runs on the CPU.

    Holds what passes get wrong: several and repeated outputs, inputs and constants among outputs, one cotangent per
    output position (read or not, early or late), dead ops, repeated expressions, results of several values used in
    part, of which some are integers, casts, views, random draws (`random`), ops under the user's checkpoint, backward
    ops that need only forward values, and writes (`writes`): by the forward to its inputs, and by either phase to
    values it made, also through views.
    """
    build = _Build(draw, _operators(writes, random))
    build.add_inputs(draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(1, max_ops))):
        build.add_op()
    outputs = build.choose_outputs()
    build.phase = Phase.BW
    pending = [(leaf.name, i) for i, leaf in enumerate(outputs) if isinstance(leaf, Var) and build.is_float(leaf.name)]
    pending = draw(st.permutations(pending))[: draw(st.integers(0, len(pending)))]
    for _ in range(draw(st.integers(0, max_ops))):
        if pending and draw(st.booleans()):
            build.add_get_grad(*pending.pop(0))
        build.add_op()
    for name, position in pending:
        build.add_get_grad(name, position)
    return Trace(tuple(build.inputs), tuple(build.ops), tuple(outputs), build.choose_grads(), build.types, by="traces")


@dataclass
class _Build:
    """A trace in the making. `readable` are the values whose memory nothing has written to since they were made."""

    draw: st.DrawFn
    operators: list[Callable[[_Build], Op | None]]
    phase: Phase = Phase.FW
    inputs: list[str] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    types: dict[str, Any] = field(default_factory=dict)
    readable: list[str] = field(default_factory=list)
    owner: dict[str, str] = field(default_factory=dict)
    phases: dict[str, Phase] = field(default_factory=dict)

    def add_inputs(self, shapes: list[tuple[int, ...]]) -> None:
        for shape in shapes:
            name = f"x{len(self.inputs)}"
            self.inputs.append(name)
            self._know(name, TensorType(shape, torch.float32), name)

    def add_op(self) -> None:
        op = self.draw(st.sampled_from(self.operators))(self)
        if op is None:
            return
        if not op.tags & {Tag.MUTATES, Tag.RANDOM} and self.phase is Phase.FW and self.draw(_rarely()):
            op = op.replace(tags=op.tags | {Tag.RECOMPUTE})
        source = Source("model.py", len(self.ops) + 1, "block") if self.draw(_rarely()) else None
        self._append(op.replace(phase=self.phase, source=source))

    def add_get_grad(self, output: str, position: int) -> None:
        op = get_grad(output, position, self.fresh())
        self.ops.append(op)
        self._know(op.outs[0], self.types[output], op.outs[0])

    def fresh(self) -> str:
        return f"v{len(self.types)}"

    def pick(self, wanted: Callable[[str], bool] = lambda name: True) -> str | None:
        """Choose a readable number for which `wanted` holds, newest first as hypothesis shrinks."""
        candidates = [name for name in reversed(self.readable) if self.is_float(name) and wanted(name)]
        return self.draw(st.sampled_from(candidates)) if candidates else None

    def pick_like(self, name: str | None, wanted: Callable[[str], bool] = lambda name: True) -> str | None:
        """Choose a value of the shape and dtype of another one."""
        return self.pick(lambda other: name is not None and self.types[other] == self.types[name] and wanted(other))

    def is_float(self, name: str) -> bool:
        return self.types[name].dtype.is_floating_point

    def shape(self, name: str) -> tuple[int, ...]:
        return self.types[name].shape

    def choose_outputs(self) -> list[Any]:
        names = st.sampled_from(self.readable[::-1]).map(Var)
        constants = st.sampled_from([None, 3])
        some = self.draw(st.lists(names, min_size=1, max_size=3))
        return some + self.draw(st.lists(constants, max_size=1))

    def choose_grads(self) -> tuple[Var | None, ...]:
        grads = []
        for name in self.inputs:
            fits = [v for v in self.readable if self.phases[v] is Phase.BW and self.types[v] == self.types[name]]
            grads.append(self.draw(st.sampled_from([None, *map(Var, fits)][::-1])))
        return tuple(grads)

    def _append(self, op: Op) -> None:
        meta = map_leaves(self._meta, (op.args, dict(op.kwargs)))
        result = op.target.fn(*meta[0], **meta[1])
        if op.writes:
            owner = self.owner[op.writes[0]]
            self.readable = [name for name in self.readable if self.owner[name] != owner]
        made = [result] if isinstance(op.out, Var) else list(result)
        out = [Var(f"v{len(self.types) + i}") for i in range(len(made))]
        for var, value in zip(out, made, strict=True):
            shares = op.writes or (op.ins if Tag.VIEW in op.tags else ())
            self._know(var.name, TensorType(tuple(value.shape), value.dtype),
                       self.owner[shares[0]] if shares else var.name)
        self.ops.append(op.replace(out=out[0] if isinstance(op.out, Var) else out))

    def _know(self, name: str, type_: Any, owner: str) -> None:
        self.types[name] = type_
        self.readable.append(name)
        self.owner[name] = owner
        self.phases[name] = self.phase

    def _meta(self, leaf: Any) -> Any:
        if not isinstance(leaf, Var):
            return leaf
        return torch.empty(self.shape(leaf.name), dtype=self.types[leaf.name].dtype, device="meta")


def _rarely() -> st.SearchStrategy[bool]:
    return st.integers(0, 7).map(lambda n: n == 7)


def _operators(writes: bool, random: bool) -> list[Callable[[_Build], Op | None]]:
    always = [_unary, _binary, _scalar, _repeat, _mm, _sum, _view, _transpose, _cat, _split, _cast, _max, _select]
    return always + [_rand_like] * 3 * random + [_copy_, _add_, _add_] * writes


def _one(overload: Any, *args: Any, **kwargs: Any) -> Op | None:
    """Return the op with its result named later, or None where an operand could not be found."""
    if any(arg is None for arg in leaves(args)):
        return None
    args = map_leaves(lambda leaf: Var(leaf) if isinstance(leaf, str) else leaf, args)
    return call(overload, *args, out=Var(""), **kwargs)


def _unary(b: _Build) -> Op | None:
    return _one(b.draw(st.sampled_from(UNARY)), b.pick())


def _binary(b: _Build) -> Op | None:
    first = b.pick()
    return _one(b.draw(st.sampled_from(BINARY)), first, b.pick_like(first))


def _scalar(b: _Build) -> Op | None:
    return _one(aten.mul.Tensor, b.pick(), b.draw(st.sampled_from([2.0, 0.5, -1.0])))


def _repeat(b: _Build) -> Op | None:
    """An expression that stands in the trace already."""
    again = [op for op in b.ops if Tag.GET_GRAD not in op.tags and not op.writes and set(op.ins) <= set(b.readable)]
    if not again:
        return None
    op = b.draw(st.sampled_from(again))
    return op.replace(tags=op.tags - {Tag.RECOMPUTE})


def _mm(b: _Build) -> Op | None:
    left = b.pick(lambda name: len(b.shape(name)) == 2)
    right = b.pick(lambda n: left is not None and len(b.shape(n)) == 2 and b.shape(n)[0] == b.shape(left)[1]
                   and b.types[n].dtype == b.types[left].dtype)
    return _one(aten.mm.default, left, right)


def _sum(b: _Build) -> Op | None:
    return _one(aten.sum.dim_IntList, b.pick(lambda name: len(b.shape(name)) > 0), [0], keepdim=b.draw(st.booleans()))


def _view(b: _Build) -> Op | None:
    return _one(aten.reshape.default, b.pick(), [-1])


def _transpose(b: _Build) -> Op | None:
    return _one(aten.t.default, b.pick(lambda name: len(b.shape(name)) == 2))


def _cat(b: _Build) -> Op | None:
    first = b.pick(lambda name: 0 < max(b.shape(name), default=0) <= 6)
    second = b.pick_like(first)
    return _one(aten.cat.default, [first, second], 0)


def _split(b: _Build) -> Op | None:
    name = b.pick(lambda name: 0 < max(b.shape(name), default=0) <= 3)
    op = _one(aten.split.Tensor, name, 1, 0)
    return op and op.replace(out=[])


def _cast(b: _Build) -> Op | None:
    name = b.pick()
    return None if name is None else _one(aten._to_copy.default, name, dtype=WIDER[b.types[name].dtype])


def _max(b: _Build) -> Op | None:
    """Two results, the second of which are integers."""
    op = _one(aten.max.dim, b.pick(lambda name: len(b.shape(name)) > 0), 0)
    return op and op.replace(out=[])


def _select(b: _Build) -> Op | None:
    return _one(aten.select.int, b.pick(lambda name: len(b.shape(name)) > 0), 0, 0)


def _rand_like(b: _Build) -> Op | None:
    return _one(aten.rand_like.default, b.pick())


def _copy_(b: _Build) -> Op | None:
    written = b.pick(lambda name: name in b.inputs and b.phase is Phase.FW)
    return _one(aten.copy_.default, written, _unrelated(b, written))


def _add_(b: _Build) -> Op | None:
    """A write to a value this phase made, or to a view of one."""
    def mine(name: str) -> bool:
        return b.owner[name] not in b.inputs and b.phases[b.owner[name]] is b.phase

    views = [name for name in b.readable if b.owner[name] != name]
    written = b.pick(lambda n: mine(n) and n in views) if b.draw(st.booleans()) else b.pick(mine)
    return _one(aten.add_.Tensor, written, _unrelated(b, written))


def _unrelated(b: _Build, written: str | None) -> str | None:
    """A value of the type of the one written to, in other memory."""
    return b.pick_like(written, lambda n: written is not None and b.owner[n] != b.owner[written])
