"""Op: one operation of a joint trace, frozen.

An op names its target (a claimed thunder symbol, or a torch operator), the values it reads and the values it makes.
Argument trees are tuples, lists and dicts whose leaves are `Var` (a value of the trace) or constants.
"""
from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from jointtrace.ir.trace import Trace


class Tag(enum.Enum):
    """What is true of an op; passes decide by tags alone, never by names."""

    RANDOM = "random"  # draws random numbers: two equal calls give different results
    MUTATES = "mutates"  # writes to a tensor it was given
    VIEW = "view"  # its output may share memory with an input; costs nothing to compute again
    COLLECTIVE = "collective"  # communicates with other ranks
    WAIT = "wait"  # waits for a collective
    COMPUTE_BOUND = "compute_bound"  # matrix product, convolution, attention: dear to compute again
    RECOMPUTE = "recompute"  # the user's checkpoint asks for it to be computed again in the backward
    SAVE = "save"  # never computed again: the user's checkpoint asks for that, or what it reads changes before then
    GET_GRAD = "get_grad"  # reads the cotangent of a forward output
    CLAIMED = "claimed"  # the user's operator executor runs it: never merged or fused, recomputed only on request
    OPAQUE = "opaque"  # nothing is known of it: never merged, recomputed, dropped or fused


NEVER_FUSED = frozenset({Tag.COLLECTIVE, Tag.WAIT, Tag.GET_GRAD, Tag.MUTATES, Tag.CLAIMED, Tag.OPAQUE})


class Phase(enum.Enum):
    """Which half of the training step an op belongs to."""

    FW = "fw"
    BW = "bw"


@dataclass(frozen=True, order=True)
class Symbol:
    """An unknown size in a shape; `hint` is the size seen when the trace was made."""

    name: str
    hint: int = field(compare=False)

    def __str__(self) -> str:
        return self.name

    def __int__(self) -> int:
        return self.hint


Size = int | Symbol


@dataclass(frozen=True)
class TensorType:
    """Shape, dtype and device of a tensor value. `strides` is None where the front end does not know them."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: str = "cpu"
    strides: tuple[Size, ...] | None = None


@dataclass(frozen=True)
class ScalarType:
    """A Python number computed at run time; `kind` is one of int, float, bool, complex."""

    kind: str


@dataclass(frozen=True)
class ObjectType:
    """Any other run-time value (a collection, a future, a generator state)."""

    kind: str = "object"


Type = TensorType | ScalarType | ObjectType


@dataclass(frozen=True)
class Var:
    """A leaf of an argument tree: the value called `name`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Target:
    """What an op calls. `name` is its identity in print and comparison; `fn` is the Python callable behind it."""

    name: str
    fn: Callable[..., Any] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Source:
    """Where in the user's program an op comes from.

    Attributes:
        file, line: the user's line; of a backward op that of its forward op.
        module: the path of the module that was running.
        op: the forward op that a backward op belongs to; empty for a forward op.
        path: the whole path of `file`, outside equality and print.
    """

    file: str
    line: int
    module: str = ""
    op: str = ""
    path: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" + (f" ({self.module})" if self.module else "")
        return f"{place} of {self.op}" if self.op else place


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of an argument tree in order."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    elif isinstance(tree, slice):
        yield from (tree.start, tree.stop, tree.step)
    else:
        yield tree


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with every leaf replaced by `fn(leaf)`; structure and container types stay."""
    if isinstance(tree, tuple):
        items = [map_leaves(fn, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [map_leaves(fn, item) for item in tree]
    if isinstance(tree, dict):
        return {key: map_leaves(fn, item) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(map_leaves(fn, tree.start), map_leaves(fn, tree.stop), map_leaves(fn, tree.step))
    return fn(tree)


def var_names(tree: Any) -> tuple[str, ...]:
    """Return the names of the values in an argument tree, in order, with repeats."""
    return tuple(leaf.name for leaf in leaves(tree) if isinstance(leaf, Var))


def hashable(tree: Any) -> Any:
    """Return a hashable stand-in for an argument tree: equal trees (types of numbers included) give equal keys."""
    if isinstance(tree, (tuple, list)):
        return (type(tree).__name__, *(hashable(item) for item in tree))
    if isinstance(tree, dict):
        return ("dict", *((key, hashable(item)) for key, item in tree.items()))
    if isinstance(tree, slice):
        return ("slice", hashable(tree.start), hashable(tree.stop), hashable(tree.step))
    if isinstance(tree, float):
        return (type(tree).__name__, tree.hex())  # tells -0.0 from 0.0, and equals nan to nan
    if isinstance(tree, complex):
        return (type(tree).__name__, tree.real.hex(), tree.imag.hex())
    if isinstance(tree, int):
        return (type(tree).__name__, int(tree))  # tells True from 1
    if isinstance(tree, torch.Tensor):
        return ("id", id(tree))  # `==` on tensors compares elements
    try:
        hash(tree)
    except TypeError:
        return ("id", id(tree))
    return tree


@dataclass(frozen=True, eq=False)
class Op:
    """One operation. Two ops are equal where they print alike: 1, 1.0 and True differ, nan equals nan.

    Attributes:
        target: what is called.
        args, kwargs: argument trees.
        out: tree of `Var` (or None for a result that is not a value) with the shape of what the target returns.
        tags: facts that decide what passes may do with it.
        phase: forward or backward.
        writes: names of the values it was given that it writes to (not empty exactly where MUTATES is set).
        source: the user's line, where known.
        body: the sub-trace of a region or of a control-flow operator.
        payload: the front end's own object (a thunder bound symbol, an FX node); outside equality and print.
        ins, outs: derived; the names read (with those `body` closes over none) and the names made.
    """

    target: Target
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    out: Any = None
    tags: frozenset[Tag] = frozenset()
    phase: Phase = Phase.FW
    writes: tuple[str, ...] = ()
    source: Source | None = None
    body: Trace | None = None
    payload: Any = field(default=None, compare=False, repr=False)
    ins: tuple[str, ...] = field(init=False, compare=False, repr=False)
    outs: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ins", var_names((self.args, dict(self.kwargs))))
        object.__setattr__(self, "outs", var_names(self.out))

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two ops that compute the same thing from the same values in the same phase."""
        return (self.target, hashable(self.args), hashable(dict(self.kwargs)), self.phase, hashable(self.out is None),
                id(self.body) if self.body is not None else None)

    def replace(self, **changes: Any) -> Op:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def rename_inputs(self, names: Mapping[str, str]) -> Op:
        """Return the op reading `names[n]` wherever it read `n`; the op itself where nothing changes."""
        if not names or not any(name in names for name in self.ins):
            return self
        args, kwargs = map_leaves(_renamer(names), (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs, writes=tuple(names.get(n, n) for n in self.writes))

    def rename_outputs(self, names: Mapping[str, str]) -> Op:
        """Return the op making `names[n]` wherever it made `n`; the op itself where nothing changes."""
        if not names or not any(name in names for name in self.outs):
            return self
        return replace(self, out=map_leaves(_renamer(names), self.out))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Op):
            return NotImplemented
        return self is other or self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((self.target.name, self.ins, self.outs, self.phase))

    def _identity(self) -> tuple[Any, ...]:
        called = (self.target, hashable(self.args), hashable(dict(self.kwargs)), self.body)
        return (*called, hashable(self.out), self.tags, self.phase, self.writes, self.source)


def _renamer(names: Mapping[str, str]) -> Callable[[Any], Any]:
    def rename(leaf: Any) -> Any:
        return Var(names.get(leaf.name, leaf.name)) if isinstance(leaf, Var) else leaf

    return rename
