"""Facts of torch operators, derived from what torch itself says of them: schema, tags, flop registry, namespace.

An operator's schema says what it writes to and what its results share memory with; it is believed. What has no schema
(a higher-order operator, a Python function) is OPAQUE, and so is an operator that returns nothing a trace can see.
Holds for torch 2.10 to 2.14: `OpOverload._schema` is the one private name used here.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from jointtrace.ir.op import Tag, var_names

COLLECTIVE_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "c10d_functional", "symm_mem"}
)
SCALAR_MODULES = frozenset({operator.add.__module__, math.floor.__module__})


def tags_of(target: Any) -> frozenset[Tag]:
    """Return the facts of a torch operator (an overload), or of a function in its place in a graph."""
    if isinstance(target, torch._ops.OpOverload):
        return _overload_tags(target)
    return frozenset() if _works_on_scalars(target) else frozenset({Tag.OPAQUE})


def is_random(overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator that may draw random numbers does: not one whose `dropout_p` is zero."""
    for position, argument in enumerate(overload._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given != 0.0
    return True


def writes_of(overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the values that a call of a torch operator writes to, each once, in argument order."""
    if not isinstance(overload, torch._ops.OpOverload):
        return ()
    named = {argument.name: value for argument, value in zip(overload._schema.arguments, args, strict=False)}
    named.update(kwargs)
    written = [named[argument.name] for argument in _written(overload) if argument.name in named]
    return tuple(dict.fromkeys(var_names(written)))


@cache
def _overload_tags(overload: torch._ops.OpOverload) -> frozenset[Tag]:
    schema = overload._schema
    tags = set()
    if any(_written(overload)):
        tags.add(Tag.MUTATES)
    if any(_is_view(result) for result in schema.returns):
        tags.add(Tag.VIEW)
    if torch.Tag.nondeterministic_seeded in overload.tags:
        tags.add(Tag.RANDOM)
    if _is_compute_bound(overload.overloadpacket):
        tags.add(Tag.COMPUTE_BOUND)
    if overload.namespace in COLLECTIVE_NAMESPACES:
        tags.add(Tag.WAIT if schema.name.endswith("::wait_tensor") else Tag.COLLECTIVE)
    if Tag.MUTATES not in tags and not any(_is_visible(result) for result in schema.returns):
        tags.add(Tag.OPAQUE)
    return frozenset(tags)


def _written(overload: torch._ops.OpOverload) -> Iterator[Any]:
    return (arg for arg in overload._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write)


def _is_view(result: Any) -> bool:
    return result.alias_info is not None and not result.alias_info.is_write


def _is_visible(result: Any) -> bool:
    """Whether a result is a value of a trace; what makes only a script object is called for its effect."""
    return not isinstance(result.type, (torch.ClassType, torch.NoneType))


@cache
def _is_compute_bound(packet: Any) -> bool:
    """Whether torch counts the operator's flops, or those of one whose name it extends (`..._attention_for_cpu`)."""
    return str(packet).startswith(tuple(map(str, flop_registry)))


def _works_on_scalars(target: Any) -> bool:
    """Whether a function in a graph only works on numbers or takes a result apart (`operator.mul`, `torch.sym_max`)."""
    name = getattr(target, "__name__", "")
    module = getattr(target, "__module__", None)
    if module == "torch":
        return name.startswith("sym_")
    return module in SCALAR_MODULES and not _writes_in_place(name)


def _writes_in_place(name: str) -> bool:
    """Whether a function of the `operator` module (`iadd`, `iand`, `setitem`) writes to its first argument."""
    twins = (name[1:], f"{name[1:]}_")
    return name in ("setitem", "delitem") or (name.startswith("i") and any(hasattr(operator, twin) for twin in twins))
