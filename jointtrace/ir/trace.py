"""Trace: one joint forward-backward program (or one half, or one region), frozen."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from jointtrace.ir.op import Op, Phase, Type, Var, hashable, var_names


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """A straight-line program in single-assignment form.

    Attributes:
        inputs: names of the arguments, in order.
        ops: operations in execution order; in a joint trace all forward ops stand before all backward ops.
        outputs: the forward's results, flat: `Var` or constants.
        grads: for a joint trace one entry per input (the `Var` of its gradient, or None); empty otherwise.
        types: type of every value by name.
        by: the pass that made this trace.
        notes: settled facts a later stage needs (for example the decomposition table); printed, compared.
    """

    inputs: tuple[str, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Any, ...]
    grads: tuple[Var | None, ...] = ()
    types: Mapping[str, Type] = field(default_factory=dict)
    by: str = field(default="", compare=False)
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.ops))
        object.__setattr__(self, "types", MappingProxyType(dict(self.types)))
        object.__setattr__(self, "notes", MappingProxyType(dict(self.notes)))

    @property
    def boundary(self) -> int:
        """Position of the first backward op (the number of forward ops)."""
        return next((i for i, op in enumerate(self.ops) if op.phase is Phase.BW), len(self.ops))

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the values among the outputs, in order, with repeats."""
        return var_names(self.outputs)

    @property
    def grad_names(self) -> tuple[str, ...]:
        """Names of the gradients that exist, in input order, with repeats."""
        return var_names(self.grads)

    def rebuild(
        self, ops: Iterable[Op], *, by: str, types: Mapping[str, Type] | None = None, **changes: Any
    ) -> Trace:
        """Return this trace with other ops; `types` holds the types of new values; types of values gone are dropped."""
        ops = tuple(ops)
        known = {**self.types, **(types or {})}
        kept = dict.fromkeys(changes.get("inputs", self.inputs))
        for op in ops:
            kept.update(dict.fromkeys(op.outs))
        return replace(self, ops=ops, by=by, types={n: known[n] for n in kept if n in known}, **changes)

    def __str__(self) -> str:
        from jointtrace.ir.text import print_trace  # text imports Trace

        return print_trace(self)

    __repr__ = __str__

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # what notebooks and hypothesis ask for

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return self is other or self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((self.inputs, self.ops))

    def _identity(self) -> tuple[Any, ...]:
        return (self.inputs, self.ops, hashable(self.outputs), self.grads, self.types, self.notes)
