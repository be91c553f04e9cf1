"""Operator executors claim a bound symbol: what will run it, as ops.

The first executor of the list that can run a symbol decides; where none can, the symbol's subsymbols are claimed.
A symbol that one of the user's fusion executors can fuse stays whole, and runs as its claimed subsymbols if in the
end it is not fused.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.extend import Executor, FusionExecutor, OperatorExecutor

from jointtrace.errors import UnsupportedError
from jointtrace.ir.op import Op, Source, Tag, Target, Type, Var, leaves, map_leaves
from jointtrace.joint.symbols import (
    flat_proxies,
    out_vars,
    source_of,
    tags_of,
    to_op,
    to_vars,
    type_of,
    types_of,
    where,
)


class Claims:
    """The ops that run some bound symbols, with the types of what they make."""

    def __init__(self, executors: Sequence[Executor], trace: TraceCtx) -> None:
        self.executors = executors
        self.trace = trace
        self.types: dict[str, Type] = {}
        self.shareable = True  # False once an executor of the user had a say: its ops may hold state

    def claim(self, bsym: BoundSymbol, source: Source | None = None, tags: frozenset[Tag] = frozenset()) -> list[Op]:
        """Return the ops that run `bsym`; they make the values that `bsym` makes, under the same names."""
        source = source or source_of(bsym)
        tags = tags | tags_of(bsym)
        if bsym.sym.python_impl is not None or bsym.sym.is_fusion:
            return [self._op(bsym, tags, source)]
        for executor in self.executors:
            if isinstance(executor, FusionExecutor):
                if Tag.MUTATES not in tags and executor.can_fuse(bsym):
                    return [self._whole(bsym, tags, source, executor)]
            elif isinstance(executor, OperatorExecutor) and executor.can_execute(bsym):
                return self._implementation(executor, bsym, tags, source)
        if bsym.sym.executor is not None:
            self.shareable = False
            return [self._op(bsym, tags, source)]
        if bsym.sym.is_prim:
            raise UnsupportedError(f"no executor runs {bsym.sym.name} ({where(bsym) or 'no source known'}); add an "
                                   "executor that implements it to thunder.jit(executors=...)")
        inherited = tags & {Tag.RECOMPUTE}
        return [op for sub in bsym.subsymbols for op in self.claim(sub, source, inherited)]

    def _op(self, bsym: BoundSymbol, tags: frozenset[Tag], source: Source | None) -> Op:
        self.types.update(types_of(bsym))
        op = to_op(bsym, tags, source)
        self.shareable &= Tag.CLAIMED not in op.tags
        return op

    def _implementation(
        self, executor: OperatorExecutor, bsym: BoundSymbol, tags: frozenset[Tag], source: Source | None
    ) -> list[Op]:
        transform = executor.get_execution_transform(bsym)
        if transform is None:
            claimed = BoundSymbol(executor.implmap[bsym.sym.id].symbol, bsym.args, bsym.kwargs, bsym.output)
            if claimed.sym._bind_postprocess:
                claimed.sym._bind_postprocess(claimed)
            return [self._op(claimed, tags, source)]
        self.trace.push_scope([])
        result = transform(*bsym.args, **bsym.kwargs)
        made = self.trace.pop_scope()
        ops = [op for part in made for op in self._claimed(part, tags, source)]
        return self.rename_results(ops, bsym, result, source)

    def _claimed(self, part: BoundSymbol, tags: frozenset[Tag], source: Source | None) -> list[Op]:
        """Return the op of a symbol that an execution transform made: it says itself what it is."""
        if part.sym.executor is None and part.sym.python_impl is None:
            return self.claim(part, source, tags & {Tag.RECOMPUTE})
        own = tags_of(part)
        effects = {Tag.RANDOM, Tag.MUTATES, Tag.COLLECTIVE, Tag.WAIT, Tag.OPAQUE, Tag.COMPUTE_BOUND, Tag.RECOMPUTE}
        return [self._op(part, own | (tags & effects), source)]

    def rename_results(self, ops: list[Op], bsym: BoundSymbol, result: Any, source: Source | None) -> list[Op]:
        """Return `ops` making the names of `bsym.output` instead of those of `result`; copies where they cannot."""
        outs = [p for p in flat_proxies(bsym.output) if isinstance(p, Proxy)]
        results = [p for p in flat_proxies(result) if isinstance(p, Proxy)]
        if len(outs) != len(results):
            raise UnsupportedError(f"{bsym.sym.name} ({where(bsym)}) has {len(outs)} results, but its implementation "
                                   f"or gradient rule returns {len(results)}. The number of outputs of the gradient "
                                   "transform function must be the same as the number of outputs of the original "
                                   "forward function.")
        made = {name for op in ops for name in op.outs}
        names: dict[str, str] = {}
        copies: list[Op] = []
        for out, new in zip(outs, results, strict=True):
            self.types[out.name] = type_of(new)
            if out.name == new.name:
                continue
            if new.name in made and new.name not in names:
                names[new.name] = out.name
            else:
                copies.append(self.copy(new, out, source))
        renamed = [op.rename_inputs(names).rename_outputs(names) for op in (*ops, *copies)]
        return renamed

    def copy(self, old: Proxy, new: Proxy, source: Source | None = None) -> Op:
        """Return an op that gives the value `old` a second name."""
        bsym = prims.shallow_copy.bind(old, output=new)
        (op,) = self.claim(bsym, source)
        return op

    def _whole(self, bsym: BoundSymbol, tags: frozenset[Tag], source: Source | None, fuser: FusionExecutor) -> Op:
        others = Claims([e for e in self.executors if e is not fuser], self.trace)
        parts = others.claim(bsym, source, tags)
        self.types.update(types_of(bsym))
        self.shareable &= others.shareable
        name = f"{fuser.name}.{bsym.sym.name}"
        fn = sequence(parts, bsym)
        return Op(Target(name, fn), to_vars(bsym.args), to_vars(bsym.kwargs), out_vars(bsym.output), tags,
                  source=source, payload=bsym)


def sequence(ops: Sequence[Op], bsym: BoundSymbol) -> Callable[..., Any]:
    """Return a callable with the signature of `bsym` that runs `ops` one after the other."""
    formal = [leaf.name if isinstance(leaf, Var) else None for leaf in leaves(to_vars((bsym.args, bsym.kwargs)))]
    result = to_vars(bsym.output)

    def run(*args: Any, **kwargs: Any) -> Any:
        actual = leaves((args, kwargs))
        values = {name: value for name, value in zip(formal, actual, strict=True) if name is not None}
        return run_ops(ops, values, result)

    return run


def run_ops(ops: Sequence[Op], values: dict[str, Any], result: Any) -> Any:
    """Run `ops` on the values by name and return the `result` tree read from them."""

    def read(leaf: Any) -> Any:
        return values[leaf.name] if isinstance(leaf, Var) else leaf

    for op in ops:
        args, kwargs = map_leaves(read, (op.args, dict(op.kwargs)))
        assert op.target.fn is not None, op.target.name
        made = op.target.fn(*args, **kwargs)
        for var, value in zip(leaves(op.out), leaves(made), strict=True):
            if isinstance(var, Var):
                values[var.name] = value
    return map_leaves(read, result)
