"""codegen: print a trace as Python and compile it.

The function runs the ops in order and drops every value right after its last use. In the boxed form it takes ONE list,
which it empties, so that no caller keeps an argument alive; a region with a `boxed` form gets its own the same way.
"""
from __future__ import annotations

import itertools
import keyword
import linecache
import math
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from jointtrace.errors import VerifyError
from jointtrace.ir.op import Op, Var, var_names
from jointtrace.ir.trace import Trace

REGION_ARGS = "region_args"
_REPR_IS_SOURCE = (torch.dtype, torch.layout, torch.memory_format)
_serial = itertools.count()


def compile_trace(trace: Trace, name: str = "forward", *, boxed: bool = True) -> Callable[..., tuple[Any, ...]]:
    """Return `trace` as a function from its inputs to the flat tuple of its outputs (gradients are not returned)."""
    source, namespace = python_source(trace, name, boxed=boxed)
    filename = f"<jointtrace {name} {next(_serial)}>"
    exec(compile(source, filename, "exec"), namespace)
    fn = namespace.pop(_identifier(name))  # else the function and its globals would keep each other alive
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(fn, linecache.cache.pop, filename, None)
    return fn


def python_source(trace: Trace, name: str = "forward", *, boxed: bool = True) -> tuple[str, dict[str, Any]]:
    """Return the source of a function called `name`, and the globals it needs.

    Raises:
        VerifyError: an op has no callable.
    """
    writer = _Writer(trace)
    values = [writer.value(v) for v in trace.inputs]
    lines: list[str] = []
    if boxed:
        lines.append(f"def {_identifier(name)}(args):")
        if values:
            lines.append(f"    [{', '.join(values)}] = args")
        lines.append("    args.clear()")
    else:
        lines.append(f"def {_identifier(name)}({', '.join(values)}):")
    lines += [f"    {line}" for line in writer.body()]
    return "\n".join(lines) + "\n", writer.namespace


class _Writer:
    """Prints ops as statements, and collects the globals they use."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.namespace: dict[str, Any] = {}
        self.taken = {"args", "slice", "torch", REGION_ARGS}
        self.values: dict[str, str] = {}
        self.constants: dict[int, str] = {}
        for made in itertools.chain(trace.inputs, *(op.outs for op in trace.ops)):
            self.value(made)

    def body(self) -> Iterator[str]:
        dying = _last_uses(self.trace)
        yield from self.drop(dying[0])
        for op, dead in zip(self.trace.ops, dying[1:], strict=True):
            yield from self.statement(op, dead)
        yield f"return {self.tuple_source(self.trace.outputs)}"

    def statement(self, op: Op, dead: Sequence[str]) -> Iterator[str]:
        fn = op.target.fn
        if fn is None:
            raise VerifyError(f"op {op.target.name} has no callable (a region must be compiled before code is written)")
        comment = f"  # {op.source}" if op.source else ""
        targets, unpack, spare = self.targets(op.out)
        if op.body is not None and not op.kwargs and hasattr(fn, "boxed"):
            yield f"{REGION_ARGS} = [{', '.join(self.source(a) for a in op.args)}]"
            yield from self.drop([v for v in dead if v in op.ins])
            dead = [v for v in dead if v not in op.ins]
            call = f"{self.constant(op.target.name, fn.boxed)}({REGION_ARGS})"
        else:
            call = f"{self.constant(op.target.name, fn)}({self.arguments(op)})"
        yield f"{targets}{call}{comment}"
        yield from unpack
        yield from self.drop(dead, spare)

    def drop(self, dead: Sequence[str], spare: Sequence[str] = ()) -> Iterator[str]:
        names = [*spare, *(self.values[v] for v in dead)]
        if names:
            yield f"del {', '.join(names)}"

    def targets(self, out: Any) -> tuple[str, list[str], list[str]]:
        """Return the assignment's left side, statements that take the result apart, and spare names to drop."""
        if not var_names(out):
            return "", [], []
        spare: list[str] = []
        if _has_dict(out):
            whole = self.fresh("result")
            unpack = [f"{self.values[leaf.name]} = {whole}{path}" for path, leaf in _paths(out)]
            return f"{whole} = ", unpack, [whole]
        pattern = self.pattern(out, spare)
        if isinstance(out, (tuple, list)) and len(out) > 1:
            pattern = pattern[1:-1]
        return f"{pattern} = ", [], spare

    def pattern(self, out: Any, spare: list[str]) -> str:
        if isinstance(out, Var):
            return self.values[out.name]
        if isinstance(out, (tuple, list)):
            return f"[{', '.join(self.pattern(item, spare) for item in out)}]"
        spare.append(self.fresh("unused"))
        return spare[-1]

    def arguments(self, op: Op) -> str:
        args = [self.source(a) for a in op.args]
        plain = all(k.isidentifier() and not keyword.iskeyword(k) for k in op.kwargs)
        if plain:
            args += [f"{k}={self.source(v)}" for k, v in op.kwargs.items()]
        else:
            args.append(f"**{self.source(dict(op.kwargs))}")
        return ", ".join(args)

    def source(self, tree: Any) -> str:
        if isinstance(tree, Var):
            return self.values[tree.name]
        if isinstance(tree, tuple):
            if hasattr(tree, "_fields"):
                return f"{self.constant(type(tree).__name__, type(tree))}({', '.join(map(self.source, tree))})"
            return self.tuple_source(tree)
        if isinstance(tree, list):
            return f"[{', '.join(map(self.source, tree))}]"
        if isinstance(tree, dict):
            return f"{{{', '.join(f'{self.source(k)}: {self.source(v)}' for k, v in tree.items())}}}"
        if isinstance(tree, slice):
            return f"slice({self.source(tree.start)}, {self.source(tree.stop)}, {self.source(tree.step)})"
        return self.leaf(tree)

    def tuple_source(self, items: Sequence[Any]) -> str:
        inner = ", ".join(map(self.source, items))
        return f"({inner},)" if len(items) == 1 else f"({inner})"

    def leaf(self, leaf: Any) -> str:
        if leaf is None or leaf is Ellipsis or type(leaf) in (bool, int, str):
            return repr(leaf)
        if type(leaf) is float and math.isfinite(leaf):
            return repr(leaf)
        if isinstance(leaf, _REPR_IS_SOURCE):
            self.namespace["torch"] = torch
            return repr(leaf)
        return self.constant(f"{leaf}" if isinstance(leaf, torch.device) else type(leaf).__name__, leaf)

    def constant(self, hint: str, value: Any) -> str:
        """Return the global that holds `value`; one global for one object."""
        known = self.constants.get(id(value))
        if known is None:
            known = self.constants[id(value)] = self.fresh(hint.removeprefix("torch."))
            self.namespace[known] = value
        return known

    def value(self, name: str) -> str:
        if name not in self.values:
            self.values[name] = self.fresh(name)
        return self.values[name]

    def fresh(self, hint: str) -> str:
        base = _identifier(hint)
        name = base
        for i in itertools.count(1):
            if name not in self.taken:
                break
            name = f"{base}_{i}"
        self.taken.add(name)
        return name


def _identifier(text: str) -> str:
    name = re.sub(r"\W", "_", text, flags=re.ASCII) or "_"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def _last_uses(trace: Trace) -> list[list[str]]:
    """Return what dies before the first op, then what dies after each op."""
    last = {name: 0 for name in trace.inputs}
    for position, op in enumerate(trace.ops, start=1):
        last.update(dict.fromkeys(op.ins, position))
        last.update(dict.fromkeys(op.outs, position))
    dying: list[list[str]] = [[] for _ in range(len(trace.ops) + 1)]
    kept = set(trace.output_names)
    for name, position in last.items():
        if name not in kept:
            dying[position].append(name)
    return dying


def _has_dict(tree: Any) -> bool:
    if isinstance(tree, (tuple, list)):
        return any(map(_has_dict, tree))
    return isinstance(tree, dict)


def _paths(tree: Any, path: str = "") -> Iterator[tuple[str, Var]]:
    if isinstance(tree, Var):
        yield path, tree
    elif isinstance(tree, (tuple, list)):
        for i, item in enumerate(tree):
            yield from _paths(item, f"{path}[{i}]")
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from _paths(item, f"{path}[{key!r}]")
