"""Options: what a user may set, checked where it is given."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jointtrace.errors import OptionError

SWITCHABLE_PASSES = ("group_get_grad", "cse", "dce", "seed_random", "recompute", "fuse")
CHECKS = (None, "eager")


@dataclass(frozen=True)
class Options:
    """What a user may set.

    Attributes:
        executors: names of the executors that may claim regions, first come first served; `eager` runs what is left.
            None: `torch_compile` where it is available, else `eager`.
        disable: names of passes to leave out (`SWITCHABLE_PASSES`).
        check: "eager" compares the first call, and the first backward, of each compilation with eager PyTorch.
        late_split: True splits the joint trace after executors have claimed regions; False, the reference, before.
    """

    executors: tuple[str, ...] | None = None
    disable: tuple[str, ...] = ()
    check: str | None = None
    late_split: bool = True

    @staticmethod
    def parse(given: Mapping[str, Any], *, late_split: bool = True) -> Options:
        """Check what the user gave and return the options; `late_split` has an argument of its own in every front end.

        Raises:
            OptionError: an unknown name, or a value of the wrong kind; the message lists what is accepted.
        """
        accepted = [f.name for f in fields(Options) if f.name != "late_split"]
        for name in given:
            if name not in accepted:
                raise OptionError(f"unknown option {name!r}; accepted: {', '.join(accepted)}")
        values = dict(given)
        for name in ("executors", "disable"):
            if values.get(name) is not None:
                values[name] = _names(name, values[name])
        _check_members("disable", values.get("disable", ()), SWITCHABLE_PASSES)
        if values.get("check") not in CHECKS:
            raise OptionError(f"option check={values['check']!r}; accepted: {', '.join(map(repr, CHECKS))}")
        return Options(**values, late_split=late_split)


def _names(option: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise OptionError(f"option {option}={value!r}; accepted: a name or a tuple of names")


def _check_members(option: str, given: tuple[str, ...], accepted: tuple[str, ...]) -> None:
    for name in given:
        if name not in accepted:
            raise OptionError(f"option {option}={name!r}; accepted: {', '.join(accepted)}")
