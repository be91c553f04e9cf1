"""patching: replace attributes of torch or thunder, all of a list or none, and put them back.

A patch is idempotent: applied twice it does nothing the second time. Two patches of one attribute stack in order.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from jointtrace.compat.versions import THUNDER, TORCH, installed

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One replacement.

    Attributes:
        owner: dotted path of the module or class that holds the attribute.
        name: the attribute.
        make: given what stands there now, returns what shall stand there; it changes nothing itself.
        item: where given, the attribute is a dict and its entry under `item()` is replaced instead.
    """

    owner: str
    name: str
    make: Callable[[Any], Any]
    item: Callable[[], Hashable] | None = None

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}" + (f"[{self.item()!r}]" if self.item else "")


class _Slot:
    """A place that holds a value: an attribute of a module or class, or an entry of a dict."""

    def __init__(self, patch: Patch) -> None:
        self.owner: Any = resolve_name(patch.owner)
        self.name: Hashable = patch.name
        if patch.item is not None:
            self.owner, self.name = getattr(self.owner, patch.name), patch.item()
        self.is_entry = patch.item is not None

    def read(self) -> Any:
        """Return the value, as a caller would see it."""
        return self.owner[self.name] if self.is_entry else getattr(self.owner, str(self.name))

    def raw(self) -> Any:
        """Return what is stored at the place itself: absent where the attribute is inherited."""
        return self.owner[self.name] if self.is_entry else vars(self.owner).get(self.name, _ABSENT)

    def write(self, value: Any) -> None:
        """Store `value`; the absent value deletes."""
        if self.is_entry:
            self.owner[self.name] = value
        elif value is _ABSENT:
            delattr(self.owner, str(self.name))
        else:
            setattr(self.owner, str(self.name), value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Slot) and self.owner is other.owner and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.owner), self.name))


@dataclass(frozen=True)
class _Applied:
    slot: _Slot
    before: Any
    after: Any


_applied: dict[Patch, _Applied] = {}  # in the order they were applied


def is_applied(patch: Patch) -> bool:
    """Say whether `patch` is in force on the object its owner names now."""
    record = _applied.get(patch)
    return record is not None and record.slot == _resolve(patch)


def apply_patches(patches: Iterable[Patch]) -> None:
    """Apply those of `patches` that are not in force yet; if one cannot be made, change nothing.

    Raises:
        ImportError: an attribute is missing; names it and the versions where it is expected.
    """
    plan: list[tuple[Patch, _Applied]] = []
    current: dict[_Slot, Any] = {}
    for patch in dict.fromkeys(patches):
        if is_applied(patch):
            continue
        slot = _resolve(patch)
        seen = current.get(slot, _ABSENT)
        after = patch.make(slot.read() if seen is _ABSENT else seen)
        plan.append((patch, _Applied(slot, slot.raw() if seen is _ABSENT else seen, after)))
        current[slot] = after
    with contextlib.ExitStack() as undo:
        for _, record in plan:
            undo.callback(record.slot.write, record.before)
            record.slot.write(record.after)
        undo.pop_all()
    for patch, record in plan:
        _applied.pop(patch, None)  # of a thunder that has since been imported anew
        _applied[patch] = record


def remove_patches(patches: Iterable[Patch]) -> None:
    """Put back what stood there before `patches`, last applied first.

    Raises:
        RuntimeError: something else replaced the attribute after us.
    """
    chosen = set(patches)
    for patch in [patch for patch in reversed(_applied) if patch in chosen]:
        record = _applied[patch]
        if record.slot.raw() is not record.after:
            raise RuntimeError(f"cannot remove the patch of {patch}: it was replaced again afterwards")
        record.slot.write(record.before)
        del _applied[patch]


def _resolve(patch: Patch) -> _Slot:
    try:
        slot = _Slot(patch)
        slot.read()
    except (ImportError, AttributeError, KeyError) as missing:
        raise ImportError(
            f"jointtrace cannot patch {patch.owner}.{patch.name}: {missing!r}; it is expected in "
            f"lightning-thunder{THUNDER} on torch{TORCH}, found lightning-thunder "
            f"{installed('lightning-thunder')} on torch {installed('torch')}; nothing was patched"
        ) from missing
    return slot
