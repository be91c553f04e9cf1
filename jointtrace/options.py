"""Options: what a user may set, checked where it is given."""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jointtrace.errors import OptionError

SWITCHABLE_PASSES = ("group_get_grad", "cse", "dce", "seed_random", "recompute", "fuse")
CHECKS = (None, "eager")
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
         "TIB": 2**40}
BUDGETS = 'a fraction in [0, 1], a number of bytes, or a size such as "6GiB" or "800 MB"'


@dataclass(frozen=True)
class Budget:
    """A limit of the planned peak of memory; prints as the user wrote it.

    Attributes:
        fraction: 1 is the peak of the fastest plan, 0 the least that a plan can have; None where bytes are given.
        nbytes: bytes, with parameters, other arguments and gradients.
    """

    fraction: float | None = None
    nbytes: int | None = None
    given: Any = field(default=None, compare=False)

    @staticmethod
    def parse(given: Any) -> Budget:
        """Return the budget that a user wrote as a fraction, as bytes or as a size with a unit.

        Raises:
            OptionError: it is none of them.
        """
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            if 0 <= given <= 1:
                return Budget(fraction=float(given), given=given)
            if given > 1 and math.isfinite(given) and given == int(given):
                return Budget(nbytes=int(given), given=given)
        elif isinstance(given, str) and (found := re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-zA-Z]+)", given.strip())):
            unit = UNITS.get(found[2].upper())
            if unit is not None:
                return Budget(nbytes=int(float(found[1]) * unit), given=given)
        raise OptionError(f"option memory_budget={given!r}; accepted: {BUDGETS}")

    def __str__(self) -> str:
        return repr(self.given)


@dataclass(frozen=True)
class Options:
    """What a user may set.

    Attributes:
        executors: names of the executors that may claim regions, first come first served; `eager` runs what is left.
            None: `torch_compile` where it is available, else `eager`.
        disable: names of passes to leave out (`SWITCHABLE_PASSES`).
        check: "eager" compares the first call, and the first backward, of each compilation with eager PyTorch.
        memory_budget: a limit of the planned peak of memory; None: the fastest plan.
        policy: called with each forward op (an `ir.op.Op`: `target.name`, `source`, `tags`); "save" keeps its results
            for the backward, "recompute" has them computed again, None leaves the choice to `recompute`.
        late_split: True splits the joint trace after executors have claimed regions; False, the reference, before.
    """

    executors: tuple[str, ...] | None = None
    disable: tuple[str, ...] = ()
    check: str | None = None
    memory_budget: Budget | None = None
    policy: Callable[[Any], Any] | None = None
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
        if values.get("memory_budget") is not None:
            values["memory_budget"] = Budget.parse(values["memory_budget"])
        if values.get("policy") is not None and not callable(values["policy"]):
            raise OptionError(f"option policy={values['policy']!r}; accepted: a function of an op that returns "
                              "'save', 'recompute' or None")
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
