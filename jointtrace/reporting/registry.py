"""registry: the records of what torch.compile compiled, found from the object it returned or was given.

Dynamo compiles code objects and shares what it made among all instances of a class, so a record is filed under the code
of the outermost function, with the instance it was made for. The compiled code owns its record: when Dynamo drops the
one, the other is gone. Only of a compilation that failed nothing is left to own it; its record lives as long as the
instance.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from jointtrace.runtime.record import Record

OWNED = "_jointtrace_record"
ORIGINAL = "_torchdynamo_orig_callable"  # Dynamo's own mark, torch 2.10 to 2.14
INLINE = "torch._dynamo.external_utils"  # the module of the function that Dynamo puts around a module of torch's own
CALLS_OF_A_MODULE = frozenset({"__call__", "_call_impl", "_wrapped_call_impl"})

Filed = tuple["weakref.ref[Any] | None", "weakref.ref[Record]"]

_filed: Any = WeakIdKeyDictionary()  # code -> list of `Filed`
_failed: Any = WeakIdKeyDictionary()  # instance -> record


@contextmanager
def registered(record: Record, fn: Any) -> Iterator[None]:
    """File `record` under what the user gave torch.compile; keep it alive where what happens meanwhile fails."""
    instance, code = identity(fn)
    if _weak(code) is not None:
        alive = [entry for entry in _filed.get(code, ()) if entry[1]() is not None]
        _filed[code] = [*alive, (_weak(instance), weakref.ref(record))]
    try:
        yield
    except BaseException:
        if _weak(instance) is not None:
            _failed[instance] = record
        raise
    _failed.pop(instance, None)


def own(compiled: Callable[..., Any], record: Record) -> None:
    """Let compiled code keep its record alive."""
    setattr(compiled, OWNED, record)


def find(fn: Any) -> list[Record]:
    """Return the records of what torch.compile returned or was given, oldest first.

    Where nothing was compiled for this very instance, Dynamo runs what it compiled for others of its class: those.
    """
    instance, code = identity(fn)
    entries = _filed.get(code, ())
    found = [(made_for, record()) for made_for, record in entries]
    alive = [(made_for() if made_for else None, record) for made_for, record in found if record is not None]
    own_records = [record for made_for, record in alive if made_for is instance]
    return own_records or [record for _, record in alive]


def identity(fn: Any) -> tuple[Any, Any]:
    """Return what `fn` calls, compiled or not: the module, object or function, and its code (a builtin itself)."""
    fn = _original(fn)
    if isinstance(fn, MethodType):
        module = isinstance(fn.__self__, nn.Module) and fn.__name__ in CALLS_OF_A_MODULE
        return identity(fn.__self__) if module else (fn.__self__, _code(fn.__func__))
    if isinstance(fn, nn.Module):
        return fn, _code(_original(fn.forward))
    return fn, _code(fn) or _code(type(fn).__dict__.get("__call__")) or fn


def _original(fn: Any) -> Any:
    """Return what torch.compile and Dynamo's own helpers wrapped."""
    while True:
        if isinstance(fn, nn.Module) and "_orig_mod" in fn._modules:
            fn = fn._orig_mod
        elif isinstance(fn, FunctionType) and ORIGINAL in vars(fn):
            fn = vars(fn)[ORIGINAL]
        elif isinstance(fn, FunctionType) and fn.__globals__.get("__name__") == INLINE:
            fn = fn.__wrapped__
        else:
            return fn


def _code(fn: Any) -> CodeType | None:
    return getattr(getattr(fn, "__func__", fn), "__code__", None)


def _weak(instance: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(instance)
    except TypeError:
        return None
