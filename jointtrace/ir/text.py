"""The text form of a trace: what a person reads, and an exact inverse of `parse`.

    trace (%x: f32[2, 3], %w: f32[3]) by=build_joint {
      fw:
        %a: f32[2, 3] = aten.mul.Tensor(%x, %w)  # model.py:12 (blocks.0.mlp)
      bw:
        %g: f32[2, 3] = get_grad(%a, 0)  # [get_grad]
        %gx: f32[2, 3] = aten.mul.Tensor(%g, %w)  # model.py:12 (blocks.0.mlp) of aten.mul.Tensor
      return (%a) grads (%gx, None)
    }

`%name` is a value. Its type stands where it is made: dtype and shape, then strides where they are known
(`f32[2, 3][3, 1]`) and the device where it is not the CPU (`f32[2, 3] cuda:0`). A size the trace does not fix is
`s0=4`: its name, and the size seen. After `#` come an op's tags, the values it writes to and the user's line, in the
backward with the forward op it belongs to.
`with trace (...) {...}` after a call is the body of a region. An object that has no literal form stands as
`$0<Tensor>`, the first entry of `constants(trace)`. A line that starts with `#` is a comment. The text depends on the
trace alone: no ids, no times, no paths but the ones in `Source`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from jointtrace.ir.names import DTYPE_ABBREVIATIONS, SCALAR_KINDS, WORD, quote, quote_device
from jointtrace.ir.op import ObjectType, Op, ScalarType, Size, Source, Symbol, Type, Var
from jointtrace.ir.parser import parse
from jointtrace.ir.trace import Trace

__all__ = ["canonical", "constants", "parse", "print_op", "print_trace", "print_type"]

INDENT = "  "


def print_trace(trace: Trace) -> str:
    """Return the text of `trace`; `parse(text, constants(trace))` gives the trace back."""
    return _Printer().trace(trace, "")


def print_op(op: Op, types: Trace | None = None) -> str:
    """Return the text of one op; with the types of what it makes where the trace that holds it is given."""
    return _Printer().op(op, types, "")


def print_type(type_: Type) -> str:
    """Return the text of a type, as `f32[2, 3]`."""
    return _Printer().type(type_)


def constants(trace: Trace) -> dict[str, Any]:
    """Return the objects that the text of `trace` only refers to, by their names in it (`$0`, `$1`, ...)."""
    printer = _Printer()
    printer.trace(trace, "")
    return {f"${i}": value for i, value in enumerate(printer.constants)}


def canonical(trace: Trace) -> str:
    """Return text that is equal for traces of one structure: values renamed in order, no source, author or size hints.

    Objects without a literal form stand as `$0<Tensor>`: programs are equal where their `constants` are equal too.
    """
    return _Printer(canonical=True).trace(trace, "")


class _Printer:
    """Prints one trace; numbers the constants, and in canonical form the values, in order of appearance."""

    def __init__(self, canonical: bool = False) -> None:
        self.canonical = canonical
        self.constants: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._renamed: dict[str, str] = {}

    def trace(self, trace: Trace, indent: str) -> str:
        outer, self._renamed = self._renamed, {}
        inner = indent + INDENT
        lines = [self._header(trace)]
        made = {*trace.inputs, *(name for op in trace.ops for name in op.outs)}
        unmade = [name for name in trace.types if name not in made]
        if unmade:
            lines.append(f"{inner}types ({self._typed(unmade, trace)})")
        phase = None
        for op in trace.ops:
            if op.phase is not phase:
                phase = op.phase
                lines.append(f"{inner}{phase.value}:")
            lines.append(inner + INDENT + self.op(op, trace, inner + INDENT))
        lines.append(f"{inner}return ({self._items(trace.outputs, inner)})")
        if trace.grads:
            lines[-1] += f" grads ({self._items(trace.grads, inner)})"
        lines.append(indent + "}")
        self._renamed = outer
        return "\n".join(lines)

    def op(self, op: Op, trace: Trace | None, indent: str) -> str:
        call = [self.tree(arg, indent) for arg in op.args]
        call += [f"{quote(key)}={self.tree(value, indent)}" for key, value in op.kwargs.items()]
        out = "" if op.out is None else self.tree(op.out, indent, lambda name: self._made(name, trace)) + " = "
        body = "" if op.body is None else " with " + self.trace(op.body, indent)
        return f"{out}{quote(op.target.name)}({', '.join(call)}){body}{self._facts(op)}"

    def tree(self, tree: Any, indent: str, var: Callable[[str], str] | None = None) -> str:
        """Print an argument tree; `var` prints its values."""
        if isinstance(tree, Var):
            return (var or self._value)(tree.name)
        if isinstance(tree, Trace):
            return self.trace(tree, indent)
        items = [self.tree(item, indent, var) for item in tree] if isinstance(tree, (tuple, list)) else []
        if type(tree) is tuple:
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        if type(tree) is list:
            return f"[{', '.join(items)}]"
        if type(tree) is torch.Size:
            return f"torch.Size({', '.join(items)})"
        if isinstance(tree, dict):
            pairs = (f"{self.tree(key, indent)}: {self.tree(value, indent, var)}" for key, value in tree.items())
            text = "{" + ", ".join(pairs) + "}"
            return text if type(tree) is dict else f"{self._constant(type(tree))}({text})"
        if isinstance(tree, slice):
            return f"slice({self._items((tree.start, tree.stop, tree.step), indent)})"
        if isinstance(tree, (tuple, list)):
            return f"{self._constant(type(tree))}({', '.join(items)})"
        return _literal(tree) or (self._symbol(tree) if isinstance(tree, Symbol) else self._constant(tree))

    def type(self, type_: Type) -> str:
        if isinstance(type_, ScalarType):
            return type_.kind if type_.kind in SCALAR_KINDS else f"scalar({quote(type_.kind)})"
        if isinstance(type_, ObjectType):
            return "object" if type_.kind == "object" else f"object({quote(type_.kind)})"
        text = DTYPE_ABBREVIATIONS[type_.dtype] + self._sizes(type_.shape)
        if type_.strides is not None:
            text += self._sizes(type_.strides)
        return text if type_.device == "cpu" else f"{text} {quote_device(type_.device)}"

    def _header(self, trace: Trace) -> str:
        text = f"trace ({self._typed(trace.inputs, trace)})"
        if trace.by and not self.canonical:
            text += f" by={quote(trace.by)}"
        if trace.notes:
            text += f" notes={self.tree(dict(trace.notes), '')}"
        return text + " {"

    def _facts(self, op: Op) -> str:
        facts = []
        if op.tags:
            facts.append(f"[{', '.join(sorted(tag.value for tag in op.tags))}]")
        if op.writes:
            facts.append(f"writes({', '.join(map(self._value, op.writes))})")
        if op.source is not None and not self.canonical:
            facts.append(_print_source(op.source))
        return f"  # {' '.join(facts)}" if facts else ""

    def _items(self, items: Iterable[Any], indent: str) -> str:
        return ", ".join(self.tree(item, indent) for item in items)

    def _typed(self, names: Iterable[str], trace: Trace) -> str:
        return ", ".join(self._made(name, trace) for name in names)

    def _made(self, name: str, trace: Trace | None) -> str:
        type_ = None if trace is None else trace.types.get(name)
        return self._value(name) if type_ is None else f"{self._value(name)}: {self.type(type_)}"

    def _value(self, name: str) -> str:
        if self.canonical:
            name = self._renamed.setdefault(name, f"v{len(self._renamed)}")
        return f"%{name if WORD.fullmatch(name) else repr(name)}"

    def _sizes(self, sizes: tuple[Size, ...]) -> str:
        return f"[{', '.join(self._size(size) for size in sizes)}]"

    def _size(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size)
        return quote(size.name) if self.canonical else f"{quote(size.name)}={size.hint}"

    def _symbol(self, symbol: Symbol) -> str:
        return f"symbol({self._size(symbol)})"

    def _constant(self, value: Any) -> str:
        number = self._numbers.setdefault(id(value), len(self.constants))
        if number == len(self.constants):
            self.constants.append(value)
        label = getattr(value, "__name__", None)
        label = label if isinstance(label, str) else type(value).__name__
        return f"${number}<{''.join(WORD.findall(label))}>"


def _literal(leaf: Any) -> str | None:
    """Return the text of a constant that can be written down, else None."""
    if leaf is None or leaf is Ellipsis:
        return "None" if leaf is None else "..."
    if type(leaf) in (bool, int, float, str, bytes):
        return repr(leaf)
    if type(leaf) is complex:
        return f"complex({leaf.real!r}, {leaf.imag!r})"
    if isinstance(leaf, (torch.dtype, torch.layout, torch.memory_format)):
        return str(leaf)
    return f"device({str(leaf)!r})" if isinstance(leaf, torch.device) else None


def _print_source(source: Source) -> str:
    text = f"{_word(source.file)}:{source.line}"
    text += f" ({_word(source.module)})" if source.module else ""
    return f"{text} of {_word(source.op)}" if source.op else text


def _word(name: str) -> str:
    return name if WORD.fullmatch(name) else repr(name)
