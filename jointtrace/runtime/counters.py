"""Counters: how often each compiled region ran, so that one that never runs is seen."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Counters:
    """Calls by region name. An increment is one list write: two threads may at worst lose a count."""

    def __init__(self) -> None:
        self._cells: dict[str, list[int]] = {}
        self._functions: dict[str, Callable[..., Any]] = {}

    def counted(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn` (and its `boxed` form, where it has one) counting its calls under `name`, from 0."""
        cell = self._cells.setdefault(name, [0])
        self._functions[name] = fn

        def call(*args: Any) -> Any:
            cell[0] += 1
            return fn(*args)

        inner = getattr(fn, "boxed", None)
        if inner is not None:

            def boxed(args: list[Any]) -> Any:
                cell[0] += 1
                return inner(args)

            call.boxed = boxed  # type: ignore[attr-defined]
        return call

    def function(self, name: str) -> Callable[..., Any] | None:
        """Return what is counted under `name`; None where nothing is."""
        return self._functions.get(name)

    def calls(self) -> dict[str, int]:
        """Return the calls by region, in the order of registration."""
        return {name: cell[0] for name, cell in self._cells.items()}

    def never_ran(self) -> tuple[str, ...]:
        """Return the regions that were compiled into a function but never called."""
        return tuple(name for name, cell in self._cells.items() if not cell[0])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what runs inside."""
        before = {name: cell[0] for name, cell in self._cells.items()}
        try:
            yield
        finally:
            for name, calls in before.items():
                self._cells[name][0] = calls

    def reset(self) -> None:
        """Start counting from 0 again."""
        for cell in self._cells.values():
            cell[0] = 0
