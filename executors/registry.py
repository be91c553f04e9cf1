"""Executors by name: the built-in ones, and those other packages offer through an entry-point group."""
from __future__ import annotations

import functools
import warnings
from importlib.metadata import EntryPoint, entry_points

from jointtrace.errors import OptionError, UnsupportedError
from jointtrace.executors.base import Executor
from jointtrace.executors.eager import EagerExecutor
from jointtrace.executors.nvfuser import NvfuserExecutor
from jointtrace.executors.torch_compile import TorchCompileExecutor

ENTRY_POINT_GROUP = "jointtrace.executors"


@functools.cache
def all_executors() -> dict[str, Executor]:
    """Return every executor by name, those that can't run here included; a built-in name can't be taken."""
    found: dict[str, Executor] = {}
    for executor in (TorchCompileExecutor(), NvfuserExecutor(), EagerExecutor()):
        found[executor.name] = executor
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, entry.value)):
        if entry.name not in found:
            found[entry.name] = _load(entry)
        elif not entry.value.startswith(__package__ or ""):  # the built-in ones are listed in the group as well
            warnings.warn(f"executor {entry.name!r} of {entry.value} ignored: the name is taken", stacklevel=2)
    return found


def resolve(names: tuple[str, ...] | None) -> tuple[Executor, ...]:
    """Return the executors called `names`, in that order; None: `torch_compile` where it can run, else `eager`.

    Raises:
        OptionError: no executor has that name.
        UnsupportedError: it can't run on this machine; the message says why.
    """
    known = all_executors()
    if names is None:
        reason = known["torch_compile"].unavailable()
        if reason is None:
            return (known["torch_compile"],)
        _warn_once(f"running eagerly, as the executor torch_compile is unavailable: {reason}")
        return (known["eager"],)
    return tuple(_available(name, known) for name in names)


def _available(name: str, known: dict[str, Executor]) -> Executor:
    if name not in known:
        raise OptionError(f"unknown executor {name!r}; known: {', '.join(known)}")
    reason = known[name].unavailable()
    if reason is not None:
        raise UnsupportedError(f"executor {name!r} is unavailable: {reason}")
    return known[name]


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _load(entry: EntryPoint) -> Executor:
    """Load one offered executor; one that can't be loaded is listed with the reason and hurts nobody else."""
    try:
        loaded = entry.load()
        executor = loaded() if isinstance(loaded, type) else loaded
    except Exception as error:  # noqa: BLE001  foreign code: anything may happen, and it is reported by name
        return _Broken(entry.name, f"{entry.value} failed to load: {type(error).__name__}: {error}")
    if not isinstance(executor, Executor) or executor.name != entry.name:
        return _Broken(entry.name, f"{entry.value} is not an executor called {entry.name!r}")
    return executor


class _Broken(EagerExecutor):
    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason

    def unavailable(self) -> str | None:
        return self.reason
