"""Expand one bound symbol by its gradient rule: forward ops, and backward ops with the cotangents they read and write.

A `Template` is made once for each distinct call (symbol, constants, and the types of its operands) and instantiated
under new names for every other, so that repeated blocks of a model cost their gradient rules once.
The order in which rules are looked for is thunder's: the executors' own, thunder's gradient rules, thunder's pairs of
augmented forward and backward; a symbol without any is decomposed.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transforms import _get_gradfn_and_executor, _grad_fn_map, augmented_forward_impls, backward_impls
from thunder.extend import Executor

from jointtrace.errors import UnsupportedError
from jointtrace.ir.op import Op, Phase, Tag, Type, hashable, map_leaves
from jointtrace.joint.by_autograd import rule_by_autograd
from jointtrace.joint.claim import Claims
from jointtrace.joint.pointwise_rules import OPERATORS
from jointtrace.joint.symbols import OWN_EXECUTORS, flat_proxies, names_in, source_of, type_of, where

Rule = Callable[..., Any]
EFFECTS = frozenset({Tag.MUTATES, Tag.OPAQUE, Tag.RANDOM})


@dataclass(frozen=True)
class Get:
    """The rule reads the cotangent of the value `of` as `grad`."""

    of: str
    grad: str


@dataclass(frozen=True)
class Put:
    """The rule adds `grad` to the cotangent of the value `to`."""

    to: str
    grad: str


@dataclass(frozen=True)
class Rest:
    """No part of the cotangent of `of` goes to `to`, which `of` replaced: eager gives `to` a gradient of zeros."""

    of: str
    to: str


@dataclass(frozen=True)
class Template:
    """One expanded call: `inputs` and `outputs` are the names it was made with, all others are local to it."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    forward: tuple[Op, ...]
    backward: tuple[Op | Get | Put, ...]
    types: dict[str, Type]
    shareable: bool


def rule_of(bsym: BoundSymbol) -> tuple[Rule | None, bool]:
    """Return the gradient rule of a bound symbol (None: decompose it) and whether its expansion may be shared.

    An executor of the user that runs the symbol but has no gradient rule for it gets ours behind it.
    """
    rule, executor = _get_gradfn_and_executor(bsym)
    if executor is OPERATORS and not OPERATORS.can_execute(bsym):  # thunder asks no checker where the parts are ours
        rule, executor = _grad_fn_map.get(bsym.sym.id), None
    if rule is None and OPERATORS.can_execute(bsym):
        rule = OPERATORS.get_grad_transform(bsym.sym)
    if executor is None:
        rule = rule_by_autograd(bsym) or rule
    if rule is not None:
        return rule, executor is None or executor.name in OWN_EXECUTORS
    forward = augmented_forward_impls.get(bsym.sym.id)
    if forward is None:
        return None, True
    return _paired_rule(bsym, forward, backward_impls[bsym.sym.id]), True


def _paired_rule(bsym: BoundSymbol, forward: Rule, backward: Rule) -> Rule:
    """Return one gradient rule made of thunder's pair of an augmented forward and a backward."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        given = {p.name for p in bsym.flat_proxy_args}
        result, saved = forward(*args, **kwargs)
        result = tree_map(
            lambda p: prims.shallow_copy(p) if isinstance(p, TensorProxy) and p.name in given else p, result
        )
        cotangents = [prims.get_grad(p) for p in flat_proxies(result) if isinstance(p, TensorProxy)]
        grads = backward(*saved, *cotangents)
        grads = [grads] if isinstance(grads, Proxy) or grads is None else list(grads)
        operands = args[2:] if bsym.sym == ltorch.autograd_function_apply else args  # first two: the functions
        _check_count(bsym, operands, grads)
        for operand, grad in zip(operands, grads, strict=False):
            if isinstance(operand, TensorProxy) and grad is not None:
                prims.put_grad(operand, grad)
        return result

    return rule


def _check_count(bsym: BoundSymbol, operands: Sequence[Any], grads: Sequence[Any]) -> None:
    tensors = sum(isinstance(operand, TensorProxy) for operand in operands)
    if not tensors <= len(grads) <= len(operands):
        raise UnsupportedError(f"Backward for {bsym.sym.name} returned {len(grads)} value(s), but expected {tensors} "
                               f"({where(bsym)}): one gradient for each tensor, or for each argument")


def call_key(bsym: BoundSymbol, names: dict[str, str]) -> tuple[Hashable, tuple[str, ...]]:
    """Return a key equal for calls with the same expansion up to names, and the names of the distinct operands."""
    slots: dict[str, int] = {}

    def leaf_key(leaf: Any) -> Any:
        if not isinstance(leaf, Proxy):
            return leaf
        slot = slots.setdefault(names.get(leaf.name, leaf.name), len(slots))
        kind = leaf.distparallel_type.name if isinstance(leaf, TensorProxy) else ""
        return ("%", slot, type_of(leaf), kind)

    key = hashable(map_leaves(leaf_key, (bsym.args, dict(bsym.kwargs))))
    return (bsym.sym, key, frozenset(bsym.tags)), tuple(slots)


def merged(bsym: BoundSymbol, names: dict[str, str]) -> BoundSymbol:
    """Return `bsym` with one proxy for operands that `names` calls alike: a tensor, and what was written to it."""
    first: dict[str, Proxy] = {}
    same = {}
    for proxy in bsym.flat_proxy_args:
        held = first.setdefault(names.get(proxy.name, proxy.name), proxy)
        if held.name != proxy.name:
            same[variableify(proxy)] = held
    return bsym.from_bsym_swap_proxies(same) if same else bsym


def is_library_symbol(bsym: BoundSymbol) -> bool:
    """Whether a symbol is one of thunder's own, whose expansion depends on its call alone."""
    return isinstance(bsym.sym.id, prims.PrimIDs) or getattr(ltorch, bsym.sym.name, None) is bsym.sym


def expand(bsym: BoundSymbol, rule: Rule | None, executors: Sequence[Executor], tags: frozenset[Tag]) -> Template:
    """Return the template of `bsym`: by its gradient `rule`, or its forward alone where `rule` is None."""
    operands = call_key(bsym, {})[1]  # not thunder's order: it sorts keyword arguments
    outputs = tuple(p.name for p in bsym.flat_proxy_outs)
    scratch = TraceCtx(None)
    scratch.names = set(names_in(bsym))
    with tracectx(scratch):
        claims = Claims(executors, scratch)
        if rule is None:
            ops = claims.claim(bsym, tags=tags)
            return Template(operands, outputs, tuple(ops), (), claims.types, claims.shareable)
        scratch.push_scope([])
        result = rule(*bsym.args, **bsym.kwargs)
        made = scratch.pop_scope()
        steps = _steps(made, claims, tags, bsym)
        forward, backward = _partition(steps, claims, bsym, result)
    return Template(operands, outputs, forward, backward, claims.types, claims.shareable)


def _steps(made: Sequence[BoundSymbol], claims: Claims, tags: frozenset[Tag], parent: BoundSymbol) -> list[Any]:
    source = source_of(parent)
    steps: list[Op | Get | Put] = []
    for bsym in made:
        if bsym.sym.id is prims.PrimIDs.GET_GRAD:
            steps.append(Get(bsym.args[0].name, bsym.output.name))
            claims.types[bsym.output.name] = type_of(bsym.output)
        elif bsym.sym.id is prims.PrimIDs.PUT_GRAD:
            steps.append(Put(bsym.args[0].name, bsym.args[1].name))
        else:
            steps.extend(claims.claim(bsym, source, tags))
    return steps


def _partition(
    steps: list[Any], claims: Claims, bsym: BoundSymbol, result: Any
) -> tuple[tuple[Op, ...], tuple[Op | Get | Put, ...]]:
    """Split a rule's steps: forward is what its results need, and what has effects but reads no cotangent."""
    ops = [step for step in steps if isinstance(step, Op)]
    renamed = claims.rename_results(ops, bsym, result, source_of(bsym))
    copies = renamed[len(ops):]
    names = {old: new for op, new_op in zip(ops, renamed, strict=False)
             for old, new in zip(op.outs, new_op.outs, strict=True) if old != new}
    passed_on = {op.ins[0]: op.outs[0] for op in copies}  # an operand returned as it is: its cotangent is the copy's
    needed = {p.name for p in flat_proxies(bsym.output) if isinstance(p, Proxy)}
    remaining = iter(renamed)
    steps = [next(remaining) if isinstance(step, Op) else _rename(step, names, passed_on) for step in steps] + copies
    late = _after_cotangents(steps)
    forward: list[Op] = []
    backward: list[Op | Get | Put] = []
    for step in reversed(steps):
        effect = isinstance(step, Op) and step.tags & EFFECTS and late.isdisjoint(step.ins)
        if isinstance(step, Op) and (effect or needed.intersection(step.outs)):
            needed.update(step.ins)
            forward.append(step)
        else:
            backward.append(step.replace(phase=Phase.BW, tags=step.tags - {Tag.RECOMPUTE}) if isinstance(step, Op)
                            else step)
    return tuple(reversed(forward)), tuple(reversed(backward))


def _after_cotangents(steps: Sequence[Any]) -> set[str]:
    """Return the values that depend on a cotangent."""
    late: set[str] = set()
    for step in steps:
        if isinstance(step, Get):
            late.add(step.grad)
        elif isinstance(step, Op) and not late.isdisjoint(step.ins):
            late.update(step.outs)
    return late


def _rename(step: Get | Put, names: dict[str, str], passed_on: dict[str, str]) -> Get | Put:
    if isinstance(step, Get):
        return Get(names.get(step.of, passed_on.get(step.of, step.of)), names.get(step.grad, step.grad))
    return Put(names.get(step.to, step.to), names.get(step.grad, step.grad))
