"""dry_run: run both halves of a compilation on tensors without memory, and note which memory is alive when.

What runs is the code that really runs: the generated halves, and in them the regions with the code their executor made.
So values die here where they die there. Not seen is memory that a single operator or kernel takes only for itself, past
torch's allocator or below its fake implementation. Of a region or half that is not compiled yet the plan by ops
(`jointtrace.ir.memory`) takes the place, and `notes` says so.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jointtrace.ir.facts import hint, storage, uses
from jointtrace.ir.memory import plan_memory
from jointtrace.ir.op import Op, ScalarType, Source, Target, TensorType, Type, Var, leaves
from jointtrace.ir.trace import Trace
from jointtrace.runtime.codegen import compile_trace
from jointtrace.runtime.counters import Counters
from jointtrace.runtime.split import Halves


class NoDryRun(Exception):
    """A half cannot run on tensors without memory; the text says why."""


@dataclass
class Block:
    """A piece of memory: what is in it, and the first and last sample at which it is alive."""

    name: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    first: int
    last: int = -1
    kind: str = "temporaries"


@dataclass(frozen=True)
class Sample:
    """A moment of a half: an op, or a kernel in the region `region`, and the bytes alive besides the arguments."""

    phase: str
    label: str
    source: Source | None
    region: str
    position: int
    nbytes: int


@dataclass
class DryRun:
    """What was alive when.

    Attributes:
        samples: moments in order.
        blocks: pieces of memory in the order they came, without the arguments.
        arguments: bytes of each argument; two that share memory count once.
        boundary: the first sample of the backward.
        saved: the memory of each value that the forward hands to the backward; None for an argument's.
        notes: what is not exact.
    """

    samples: list[Sample] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    arguments: dict[str, int] = field(default_factory=dict)
    boundary: int = 0
    saved: dict[str, Block | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Tracker(TorchDispatchMode):
    """Notes each new piece of memory, and samples what is alive after each operator."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self.run = run
        self.alive: dict[int, tuple[StorageWeakRef, Block]] = {}
        self.arguments: dict[int, StorageWeakRef] = {}
        self.planned = 0  # bytes of what has no code yet
        self.place: tuple[str, int, Op | None] = ("fw", 0, None)
        self.region: _Region | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        new = any([self.see(leaf) for leaf in tree_leaves(result)])
        outside = self.region is not None or self.place[2] is None
        if outside and func.overloadpacket in (torch.ops.aten.empty_strided, torch.ops.aten.empty):
            return result  # for what comes next
        if new or func._schema.is_mutable:
            self.sample(str(func.overloadpacket), tree_leaves((args, kwargs)))
        return result

    def see(self, value: Any, name: str = "") -> bool:
        """Note the memory of a tensor, where it is new; name it where it has no name."""
        if not isinstance(value, FakeTensor):
            return False
        key = value.untyped_storage()._cdata
        if key in self.arguments:
            return False
        if (known := self.alive.get(key)) is not None and not known[0].expired():
            known[1].name = known[1].name or name
            return False
        if known is not None:
            self.bury(key)
        dtype = str(value.dtype).removeprefix("torch.")
        block = Block(name, value.untyped_storage().nbytes(), tuple(value.shape), dtype, len(self.run.samples))
        self.alive[key] = StorageWeakRef(value.untyped_storage()), block
        self.run.blocks.append(block)
        return True

    def hold(self, name: str, value: Any) -> None:
        """Note an argument: its memory is the caller's."""
        if isinstance(value, FakeTensor) and value.untyped_storage()._cdata not in self.arguments:
            self.arguments[value.untyped_storage()._cdata] = StorageWeakRef(value.untyped_storage())
            self.run.arguments[name] = value.untyped_storage().nbytes()

    def block_of(self, value: Any) -> Block | None:
        """Return the memory of a tensor; None for an argument."""
        found = self.alive.get(value.untyped_storage()._cdata) if isinstance(value, FakeTensor) else None
        return found[1] if found else None

    def sample(self, label: str, args: Iterable[Any] = ()) -> None:
        """Note what is alive while an operator or kernel runs."""
        for key in [key for key, (ref, _) in self.alive.items() if ref.expired()]:
            self.bury(key)
        phase, position, op = self.place
        source = op.source if op is not None else None
        if self.region is not None:
            source = self.region.source_of(label, args) or source
        elif op is not None:
            label = op.target.name
        nbytes = self.planned + sum(block.nbytes for _, block in self.alive.values())
        region = self.region.op.target.name if self.region is not None else ""
        self.run.samples.append(Sample(phase, label, source, region, position, nbytes))

    def bury(self, key: int) -> None:
        """Note that memory is free."""
        self.alive.pop(key)[1].last = len(self.run.samples) - 1


class _Region:
    """Tells which op of a region a kernel belongs to, as far as the inputs of the region tell that it reads.

    That is an op that reads the same input, the one with the fewest ops around it that do, and is in the kernel's name.
    """

    def __init__(self, op: Op, args: Sequence[Any]) -> None:
        assert op.body is not None
        self.op, self.body = op, op.body
        readers = uses(op.body)
        self.readers: dict[int, list[int]] = {}
        # else the key of an input that is freed meanwhile would come again
        self.inputs = [StorageWeakRef(v.untyped_storage()) for v in args if isinstance(v, FakeTensor)]
        for name, value in zip(op.body.inputs, args, strict=True):
            if isinstance(value, FakeTensor):
                of_input = self.readers.setdefault(value.untyped_storage()._cdata, [])
                of_input.extend(i for i in readers[name] if i < len(op.body.ops))
        self.last = 0

    def source_of(self, label: str, args: Iterable[Any]) -> Source | None:
        """Return the source of the op that a kernel belongs to."""
        read = {value.untyped_storage()._cdata for value in args if isinstance(value, FakeTensor)}
        inputs = [readers for key, readers in self.readers.items() if key in read and readers]
        if inputs:
            closest = min(inputs, key=lambda readers: max(readers) - min(readers))
            alike = [i for i in closest if _short(self.body.ops[i]) in label]
            self.last = min(alike or closest)
        return self.body.ops[self.last].source if self.body.ops else None


def _short(op: Op) -> str:
    parts = op.target.name.split(".")
    return parts[-2] if len(parts) > 2 else parts[-1]


def run_dry(halves: Halves, counters: Counters) -> DryRun:
    """Return what is alive when in the halves of one compilation, whose regions `counters` knows.

    Raises:
        NoDryRun: a half cannot run on tensors without memory.
    """
    run = DryRun()
    try:
        with torch.no_grad(), torch._C._DisableAutocast(), FakeTensorMode(allow_non_fake_inputs=True):
            _run(Tracker(run), run, halves, counters)
    except NoDryRun:
        raise
    except Exception as error:  # of an operator without a fake implementation
        first = next(iter(str(error).strip().splitlines()), "")
        raise NoDryRun(f"{type(error).__name__}: {first}") from error
    run.notes = list(dict.fromkeys(run.notes))
    return run


def _run(tracker: Tracker, run: DryRun, halves: Halves, counters: Counters) -> None:
    forward, backward = halves.forward, halves.backward
    arguments = [_example(forward, name) for name in forward.inputs]
    for name, value in zip(forward.inputs, arguments, strict=True):
        tracker.hold(name, value)
    with tracker:
        made = _half(tracker, forward, counters)(list(arguments))
        count = len(halves.cotangents)
        names = [leaf.name for leaf in leaves(forward.outputs[count:])]
        saved = dict(zip(names, made[count:], strict=True))
        results = made[:count]
        del made
        tracker.place = ("fw", len(forward.ops), None)
        tracker.sample("end of the forward")
        run.boundary = len(run.samples)
        run.saved = {name: tracker.block_of(value) for name, value in saved.items()}
        _mark(tracker, results, "results")
        _mark(tracker, saved.values(), "kept activations")
        if backward is not None:
            tracker.place = ("bw", 0, None)
            args = [saved.pop(n) if n in saved else _cotangent(tracker, backward, n) for n in backward.inputs]
            saved.clear()
            grads = _half(tracker, backward, counters)(args)
            tracker.place = ("bw", len(backward.ops), None)
            tracker.sample("end of the backward")
            _mark(tracker, grads, "gradients")
    for _, block in tracker.alive.values():
        block.last = len(run.samples) - 1


def _cotangent(tracker: Tracker, backward: Trace, name: str) -> Any:
    value = _example(backward, name)
    tracker.see(value, name)
    return value


def _mark(tracker: Tracker, values: Iterable[Any], kind: str) -> None:
    for value in values:
        block = tracker.block_of(value)
        if block is not None:
            block.kind = kind


def _example(trace: Trace, name: str) -> Any:
    """Return a value like the one called `name`."""
    kind: Type | None = trace.types.get(name)
    if isinstance(kind, TensorType):
        shape = [hint(size) for size in kind.shape]
        if kind.strides is None:
            return torch.empty(shape, dtype=kind.dtype, device=kind.device)
        return torch.empty_strided(shape, [hint(s) for s in kind.strides], dtype=kind.dtype, device=kind.device)
    if isinstance(kind, ScalarType):
        for op in trace.ops:
            for payload in (inner.payload for inner in (op.body.ops if op.body else (op,))):
                nodes = payload.graph.nodes if isinstance(payload, torch.fx.Node) else ()
                for node in nodes:
                    if node.name == name and hasattr(node.meta.get("val"), "node"):
                        return node.meta["val"].node.hint
    raise NoDryRun(f"the value of %{name} is known only when the program runs")


def _half(tracker: Tracker, trace: Trace, counters: Counters) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a half as the function that runs, each op followed."""
    ops = []
    for position, op in enumerate(trace.ops):
        is_region = op.body is not None and (op.target.fn is None or counters.function(op.target.name) is not None)
        followed = _follow_region if is_region else _follow
        ops.append(op.replace(target=Target(op.target.name, followed(tracker, position, op, counters))))
    return compile_trace(trace.rebuild(ops, by=trace.by), "dry_run")


def _follow(tracker: Tracker, position: int, op: Op, _: Counters) -> Callable[..., Any]:
    fn = op.target.fn
    assert fn is not None

    def call(*args: Any, **kwargs: Any) -> Any:
        tracker.place = (op.phase.value, position, op)
        result = fn(*args, **kwargs)
        _name(tracker, op, result)
        tracker.sample(op.target.name)
        return result

    return call


def _follow_region(tracker: Tracker, position: int, op: Op, counters: Counters) -> Callable[..., Any]:
    compiled = counters.function(op.target.name)

    def boxed(args: list[Any]) -> Any:
        tracker.place, tracker.region = (op.phase.value, position, op), _Region(op, args)
        dry = compiled.dry_run(args, tracker.sample) if hasattr(compiled, "dry_run") else None  # type: ignore[union-attr]
        result = dry(args) if dry is not None else _not_compiled(tracker, op, args)
        _name(tracker, op, result)
        tracker.sample("end of the region")
        tracker.region = None
        return result

    def call(*args: Any) -> Any:
        return boxed(list(args))

    call.boxed = boxed  # type: ignore[attr-defined]
    return call


def _not_compiled(tracker: Tracker, op: Op, args: list[Any]) -> Sequence[Any]:
    body = op.body
    assert body is not None
    tracker.run.notes.append(f"{op.target.name} shows no code (it is compiled when it first runs, or its executor has "
                             "none to show): inside it the figures are planned op by op")
    return _planned(tracker, body, args)


def _planned(tracker: Tracker, trace: Trace, args: list[Any]) -> Sequence[Any]:
    """Run what is not compiled: its memory is that of the plan by ops, its results are new."""
    owner, memory = storage(trace), plan_memory(trace, lambda _: True)
    values = dict(zip(trace.inputs, args, strict=True))
    args.clear()
    results: dict[str, Any] = {}
    outputs = set(trace.output_names)
    last = _last_reads(trace)
    for position, op in enumerate(trace.ops):
        for life in memory.lifetimes:
            if life.start == position and life.name in outputs:
                results[life.name] = _example(trace, life.name)
        mine = sum(block.nbytes for value in results.values() if (block := _seen(tracker, value)) is not None)
        tracker.planned = memory.alive[position] - mine
        tracker.sample(op.target.name)
        for name in last.get(position, ()):
            values.pop(name, None)
    tracker.planned = 0
    return tuple(_result(trace, leaf, owner, values, results) for leaf in trace.outputs)


def _seen(tracker: Tracker, value: Any) -> Block | None:
    tracker.see(value)
    return tracker.block_of(value)


def _last_reads(trace: Trace) -> dict[int, list[str]]:
    """Return for each position the inputs whose memory nothing reads after it; outputs are read at the end."""
    owner = storage(trace)
    end: dict[str, int] = dict.fromkeys(trace.inputs, 0)
    for position, op in enumerate(trace.ops):
        end.update((owner[name], position) for name in op.ins if owner[name] in end)
    kept = {owner[name] for name in trace.output_names}
    found: dict[int, list[str]] = {}
    for name, position in end.items():
        if name not in kept:
            found.setdefault(position, []).append(name)
    return found


def _result(trace: Trace, leaf: Any, owner: dict[str, str], values: dict[str, Any], results: dict[str, Any]) -> Any:
    if not isinstance(leaf, Var):
        return leaf
    name = owner[leaf.name]
    if name in values:
        return values[name]
    if name not in results:
        results[name] = _example(trace, name)
    return results[name]


def _name(tracker: Tracker, op: Op, result: Any) -> None:
    values = result if isinstance(op.out, (tuple, list)) else (result,)
    with contextlib.suppress(ValueError):  # a result that no value stands for
        for leaf, value in zip(leaves(op.out), _flat(values), strict=True):
            if isinstance(leaf, Var):
                tracker.see(value, leaf.name)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value
