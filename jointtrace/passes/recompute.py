"""recompute: choose which forward values are kept for the backward, and which it computes again.

Requires  a joint trace in dependency order, without dead ops (what a dead op reads would be kept).
Ensures   same inputs, outputs, gradients and values. Keeping a value costs its real bytes, next to nothing where the
          caller keeps its memory alive anyway; computing an op again costs what an analytic model says. Without a
          budget the plan is a minimum cut, and of all minimum cuts the one with the least to compute again; what is
          compute-bound, or runs outside a compiled loop, is computed again in the user's checkpoints only (RECOMPUTE),
          whose values are not kept. Within a budget the plan is the cheapest whose planned peak it allows. Never
          computed again are ops that draw random numbers, communicate, write to memory, read memory that the trace
          writes to, or of which nothing is known. Each op is computed again once, as `bw_<name>`, right before the
          first backward op that needs it.
Cost      one minimum cut over a graph of O(ops + operands); a budget takes a few integer programs more.
"""
from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from jointtrace.errors import OptionError, UnsupportedError
from jointtrace.ir.facts import nbytes
from jointtrace.ir.op import Op, Tag
from jointtrace.ir.trace import Trace
from jointtrace.options import Budget
from jointtrace.passes._choice import Choice, cheapest, choice_of, plan_of
from jointtrace.passes._copy import compute_again
from jointtrace.passes._cost import KEPT_BYTE, PREMIUM
from jointtrace.passes._limit import Planned, Search
from jointtrace.passes._save import check_overwritten, saved

__all__ = ["cost_of_recompute", "recompute", "saved", "search", "why_kept"]

Policy = Callable[[Op], Any]
POLICIES = {
    "save": Tag.SAVE, CheckpointPolicy.MUST_SAVE: Tag.SAVE, CheckpointPolicy.PREFER_SAVE: Tag.SAVE,
    "recompute": Tag.RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE: Tag.RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: Tag.RECOMPUTE,
}


def recompute(
    trace: Trace, *, fused: Callable[[Op], bool], budget: Budget | None = None, policy: Policy | None = None
) -> Trace:
    """Return `trace` with a backward that computes again what is not worth keeping.

    Args:
        trace: the joint trace.
        fused: says of an op whether an executor would compile it with others.
        budget: a limit of the planned peak.
        policy: says of a forward op whether its results are to be kept ("save") or computed again ("recompute").

    Raises:
        UnsupportedError: the backward reads a value that the forward overwrites in place; a value must neither be kept
            nor computed again; no plan stays within the budget.
    """
    check_overwritten(trace)
    asked = _asked(trace, policy)
    choice = _choice(asked, fused, None)
    if policy:
        _check_policy(trace, choice)
    if budget is None or budget.fraction == 1:
        return compute_again(asked, cheapest(choice))
    return compute_again(asked, _within(search(asked, fused), budget))


def search(trace: Trace, fused: Callable[[Op], bool]) -> Search:
    """Return the search for plans within a budget, which begins with the plan without one."""
    return Search(_choice(trace, fused, Budget(fraction=0.0)), cheapest(_choice(trace, fused, None)))


def why_kept(
    trace: Trace, *, fused: Callable[[Op], bool], budget: Budget | None = None, policy: Policy | None = None
) -> dict[str, str]:
    """Return for forward values why they cannot be computed again; without a reason keeping them is just cheaper."""
    return dict(_choice(_asked(trace, policy), fused, budget).why_kept)


def cost_of_recompute(
    trace: Trace, again: Set[str], *, fused: Callable[[Op], bool], budget: Budget | None = None,
    policy: Policy | None = None,
) -> dict[str, int]:
    """Return for each value that a plan keeps and need not what computing it again would add to the plan's cost."""
    choice = _choice(_asked(trace, policy), fused, budget)
    cost, kept = choice.cost(again), plan_of(choice, again)[0]
    return {name: choice.cost({*again, name}) - cost for name in kept if name not in choice.why_kept}


def _choice(trace: Trace, fused: Callable[[Op], bool], budget: Budget | None) -> Choice:
    if budget is None or budget.fraction == 1:
        return replace(choice_of(trace, fused, _too_dear(fused)), price=KEPT_BYTE * PREMIUM)
    return choice_of(trace, fused, _on_request)


def _within(plans: Search, budget: Budget) -> Set[str]:
    if budget.nbytes is None:
        return plans.at(budget.fraction or 0.0).again
    trace = plans.choice.trace
    arguments = sum(nbytes(kind) for name in trace.inputs if (kind := trace.types.get(name)))
    plan = plans.within(budget.nbytes - arguments)
    if plan is None:
        raise UnsupportedError(_too_small(budget, arguments, plans.smallest))
    return plan.again


def _too_small(budget: Budget, arguments: int, least: Planned) -> str:
    return (
        f"memory_budget={budget} is {budget.nbytes} bytes, but parameters and other arguments take {arguments} and the "
        f"plan with the least memory {least.peak_bytes} more; give at least {arguments + least.peak_bytes}"
    )


def _asked(trace: Trace, policy: Policy | None) -> Trace:
    """Return `trace` with what the user's policy asks for as tags; it may ask nothing of a view."""
    if policy is None:
        return trace
    ops = list(trace.ops)
    for position, op in enumerate(ops[: trace.boundary]):
        answer = policy(op)
        if answer is None or Tag.VIEW in op.tags:
            continue
        if answer not in POLICIES:
            raise OptionError(f"option policy returned {answer!r} for {op.target.name}; "
                              f"accepted: {', '.join(map(repr, POLICIES))}, None")
        ops[position] = op.replace(tags=op.tags - set(POLICIES.values()) | {POLICIES[answer]})
    return trace.rebuild(ops, by=trace.by)


def _check_policy(trace: Trace, choice: Choice) -> None:
    """Raise where the policy asks for what cannot be: a checkpoint may hold random ops, a wish for one op is meant."""
    for before, op in zip(trace.ops, choice.trace.ops, strict=True):
        reason = next((choice.why_kept[name] for name in op.outs if name in choice.why_kept), None)
        if reason is not None and Tag.RECOMPUTE in op.tags - before.tags:
            raise UnsupportedError(f"policy: %{op.outs[0]}{f' ({op.source})' if op.source else ''} cannot be computed "
                                   f"again, as {reason}; return 'save' or None for it")


def _too_dear(fused: Callable[[Op], bool]) -> Callable[[Op], str | None]:
    def too_dear(op: Op) -> str | None:
        if dear := op.tags & {Tag.COMPUTE_BOUND, Tag.CLAIMED}:
            return f"{op.target.name} is {min(tag.value for tag in dear)}"
        return None if fused(op) else f"{op.target.name} runs outside a compiled loop"

    return too_dear


def _on_request(op: Op) -> str | None:
    return f"{op.target.name} is {Tag.CLAIMED.value}" if Tag.CLAIMED in op.tags else None
