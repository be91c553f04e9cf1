"""Any thunder fusion executor as an executor of ours: it fuses the bound symbols that our ops carry as payload.

The only file here that needs thunder, which is imported once such an executor is at hand (holds for thunder 0.2.6).
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jointtrace.errors import UnsupportedError
from jointtrace.executors.base import Compiled, gains
from jointtrace.ir.op import NEVER_FUSED, Op, Type, Var, leaves

if TYPE_CHECKING:
    from thunder.core.symbol import BoundSymbol
    from thunder.extend import FusionExecutor


class ThunderFusionExecutor:
    """Claims what a thunder fusion executor can fuse, and has it fuse whole regions."""

    fuses = True

    def __init__(self, thunder_executor: FusionExecutor) -> None:
        self.name = str(thunder_executor.name)
        self.thunder_executor = thunder_executor
        self._serial = itertools.count()

    def unavailable(self) -> str | None:
        """Never: thunder has no executor object for what can't run."""
        return None

    def can_run(self, op: Op, types: Mapping[str, Type]) -> bool:
        """What the thunder executor can fuse; an op without a bound symbol is not thunder's."""
        if op.tags & NEVER_FUSED or op.body is not None or not hasattr(op.payload, "sym"):
            return False
        return self.thunder_executor.can_fuse(op.payload)

    def wants(self, ops: Sequence[Op]) -> bool:
        """A group with one of the ops the thunder executor is there for, where it names them (`required_ops`)."""
        required = getattr(self.thunder_executor, "required_ops", None)
        if required is not None:
            return any(op.payload.sym.id in required for op in ops)
        return gains(ops)

    def compile(self, region: Op) -> Compiled:
        """Have thunder fuse the bound symbols of `region`."""
        body = region.body
        if body is None:
            raise ValueError(f"{region.target.name} is no region")
        symbols = [_with_our_names(op) for op in body.ops]
        outputs = [leaf.name for leaf in body.outputs]
        try:
            fused = self.thunder_executor.fuse(_region(symbols, body.inputs, outputs), next(self._serial))
        except Exception as error:
            raise UnsupportedError(
                f"thunder's executor {self.name} failed on region {region.target.name} "
                f"({', '.join(op.target.name for op in body.ops)}): {type(error).__name__}: {error}"
            ) from error
        return _in_our_order(fused, body.inputs, outputs)


@dataclass
class _Region:
    """What `FusionExecutor.fuse` reads."""

    inputs: list[Any]
    outputs: list[Any]
    bound_symbols: list[BoundSymbol]


def _region(symbols: list[BoundSymbol], inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    from thunder.core.proxies import Proxy, variableify

    proxies = {}
    for symbol in symbols:
        for proxy in (*symbol.flat_args, *symbol.flat_outs):
            if isinstance(proxy, Proxy):
                proxies.setdefault(proxy.name, variableify(proxy))
    return _Region([proxies[n] for n in inputs], [proxies[n] for n in outputs], symbols)


def _with_our_names(op: Op) -> BoundSymbol:
    """Return the bound symbol behind `op` reading and making what `op` reads and makes, where a pass renamed it."""
    from thunder.core.proxies import Proxy, variableify
    from thunder.core.trace import TraceCtx, tracectx

    symbol = op.payload
    theirs = leaves((symbol.args, symbol.kwargs, symbol.output))
    ours = leaves((op.args, dict(op.kwargs), op.out))
    renamed = {}
    with tracectx(TraceCtx(None)):
        for proxy, leaf in zip(theirs, ours, strict=True):
            if isinstance(proxy, Proxy) and isinstance(leaf, Var) and proxy.name != leaf.name:
                renamed[variableify(proxy)] = proxy.replace_name(leaf.name)
    return symbol.from_bsym_swap_proxies(renamed)


def _in_our_order(fused: BoundSymbol, inputs: Sequence[str], outputs: Sequence[str]) -> Compiled:
    """Return the callable behind `fused`: thunder may leave out inputs that it does not need."""
    context: Mapping[str, Callable[..., Any]] = fused._call_ctx or {}
    call = context[fused.sym.name]
    taken = [inputs.index(proxy.name) for proxy in fused.args]
    made = [proxy.name for proxy in fused.flat_outs]
    given = [made.index(name) for name in outputs]

    def run(*args: Any) -> tuple[Any, ...]:
        results = call(*[args[i] for i in taken])
        return tuple([results[i] for i in given])

    return run
