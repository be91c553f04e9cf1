"""link: give every region of a trace its compiled callable.

Regions of one structure share one callable, in all traces of the process: repeated blocks are compiled once.
"""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jointtrace.errors import VerifyError
from jointtrace.ir.op import Op, Symbol, Target, TensorType
from jointtrace.ir.text import canonical, constants
from jointtrace.ir.trace import Trace
from jointtrace.regions.fuse import executor_of
from jointtrace.runtime.counters import Counters

if TYPE_CHECKING:
    from jointtrace.executors.base import Executor

_compiled: weakref.WeakValueDictionary[tuple[Any, ...], Callable[..., Any]] = weakref.WeakValueDictionary()


def link(trace: Trace, executors: Sequence[Executor], counters: Counters) -> Trace:
    """Return `trace` with a callable, counted by `counters`, behind each region that one of `executors` made."""
    by_name = {executor.name: executor for executor in executors}
    ops = [op if op.body is None or op.target.fn is not None else _linked(op, by_name, counters) for op in trace.ops]
    return trace.rebuild(ops, by=trace.by)


def _linked(region: Op, executors: dict[str, Executor], counters: Counters) -> Op:
    name = executor_of(region)
    if name not in executors:
        raise VerifyError(f"region {region.target.name} is of executor {name!r}, which is not among {[*executors]}")
    compiled = counters.counted(region.target.name, _compile_once(region, executors[name]))
    return region.replace(target=Target(region.target.name, compiled))


def _compile_once(region: Op, executor: Executor) -> Callable[..., Any]:
    body = region.body
    assert body is not None
    if constants(body) or _has_symbols(body):  # equal text does not mean equal objects, or sizes with equal guards
        return executor.compile(region)
    key = (executor, canonical(body), *(op.target.fn for op in body.ops))
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = executor.compile(region)
        with contextlib.suppress(TypeError):  # some callables, as builtins, take no weak reference
            _compiled[key] = compiled
    return compiled


def _has_symbols(body: Trace) -> bool:
    """Whether a region is made for sizes that are known only when it runs."""
    return any(isinstance(size, Symbol) for t in body.types.values() if isinstance(t, TensorType)
               for size in (*t.shape, *(t.strides or ())))
