"""thunder_reference: the user's program as thunder traced it, run by torch's own functions and torch's autograd.

Each symbol runs as the torch function it stands for, in place where that is. What has no torch function of its name,
or draws random numbers, runs as its parts; what is drawn is taken from the joint trace.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import Proxy, ProxyTag
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import Executor

from jointtrace.checking.compare import OTHER_CODE, difference
from jointtrace.checking.interpret import copies, flat_ops
from jointtrace.checking.program import Outcome, Program
from jointtrace.ir.op import Op, Phase, Source, Tag, leaves, map_leaves
from jointtrace.joint.build import SKIPPED, Joint
from jointtrace.joint.claim import Claims, run_ops
from jointtrace.joint.symbols import flat_proxies, source_of, tags_of, to_vars

TAGS: Any = ProxyTag  # thunder adds members to it while it is imported


@dataclass
class _Step:
    """One symbol that ran: the names it read and made, and how to run it again."""

    name: str
    source: Source | None
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    again: Callable[[Mapping[str, Any]], Any]
    pure: bool


class ThunderReference:
    """Runs a computation trace.

    Args:
        computation: thunder's trace of the user's program.
        executors: what may claim a symbol that no torch function stands for.
        joint: the joint trace made of it.
    """

    name = "eager"
    tolerance = OTHER_CODE

    def __init__(self, computation: TraceCtx, executors: Sequence[Executor], joint: Joint) -> None:
        self.computation = computation
        self.executors = executors
        self.names = joint.names
        self.differentiable: tuple[bool, ...] | None = joint.differentiable
        self.tracks = bool(joint.trace.grad_names)  # there is a backward
        self.inputs = [p for p in flat_proxies((computation.args, computation.kwargs)) if isinstance(p, Proxy)]
        self.values: dict[str, Any] = {}
        self.made: dict[str, Any] = {}
        self.steps: list[_Step] = []
        self.outputs: list[Any] = []
        self.cotangents: Mapping[int, Any] = {}

    def run(
        self, inputs: Sequence[Any], cotangents: Mapping[int, Any] | None, drawn: Mapping[str, Any]
    ) -> Outcome | None:
        """Run the program and, where there are cotangents, torch's autograd behind it; None where that refuses."""
        needs = [self.tracks and bool(getattr(p, "requires_grad", False)) for p in self.inputs]
        given = [v.detach().requires_grad_() if need else v for v, need in zip(copies(inputs), needs, strict=True)]
        # not the leaf itself: the program may write to it
        self.made, self.steps, self.drawn = {}, [], drawn
        with torch.set_grad_enabled(self.tracks):
            started = [v.clone() if need else v for v, need in zip(given, needs, strict=True)]
            self.values = {p.name: v for p, v in zip(self.inputs, started, strict=True)}
            for bsym in self.computation.bound_symbols[:-1]:
                if bsym.sym.id not in SKIPPED:
                    self.execute(bsym)
            outputs = [self.values[o.name] if isinstance(o, Proxy) else o
                       for o in flat_proxies(self.computation.bound_symbols[-1].args[0]["output"])]
        grads = None
        if cotangents is not None:
            self.cotangents, self.outputs = cotangents, outputs
            wanted = [v for v, need in zip(given, needs, strict=True) if need]
            try:
                found = iter(self.gradients(outputs, wanted))
            except RuntimeError:  # a write to what the backward needs, of which we keep a copy
                return None
            grads = [next(found) if need else None for need in needs]
        after = [self.values[p.name].detach() if isinstance(self.values[p.name], torch.Tensor) else self.values[p.name]
                 for p in self.inputs]
        needed = tuple(map(_tracked, outputs)) if self.tracks else None
        return Outcome([o.detach() if isinstance(o, torch.Tensor) else o for o in outputs], grads, after, {}, needed)

    def gradients(self, outputs: Sequence[Any], wanted: Sequence[torch.Tensor]) -> list[Any]:
        """Return the gradients of the outputs that have a cotangent."""
        pairs = [(outputs[i], c) for i, c in self.cotangents.items()
                 if _tracked(outputs[i])]
        if not pairs or not wanted:
            return [None] * len(wanted)
        roots, seeds = zip(*pairs, strict=True)
        return list(torch.autograd.grad(roots, wanted, seeds, allow_unused=True, retain_graph=True))

    # running

    def execute(self, bsym: Any) -> None:
        """Run one symbol."""
        random = Tag.RANDOM in tags_of(bsym)
        arguments = map_leaves(_to_torch, (bsym.args, bsym.kwargs))
        known = () if random else torch_functions(bsym.sym.id)
        if not any(self.done(bsym, fn, arguments) for fn in known):
            self.execute_parts(bsym, random)

    def done(self, bsym: BoundSymbol, fn: Callable[..., Any], arguments: Any) -> bool:
        """Run a symbol as a torch function, if that takes the arguments and gives results of the same structure."""
        def again(values: Mapping[str, Any]) -> Any:
            args, kwargs = map_leaves(lambda leaf: values[leaf.name] if isinstance(leaf, Proxy) else leaf, arguments)
            return fn(*args, **kwargs)

        outs = [p for p in flat_proxies(bsym.output) if isinstance(p, Proxy)]
        versions = self.versions(bsym)
        detached = any(TAGS.DETACHED_AUTOGRAD_GRAPH in p.tags for p in outs)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
                results = list(leaves(again(self.values)))
        except (TypeError, RuntimeError, ValueError, NotImplementedError):
            return False  # its parts say the same
        if len(results) != len(list(flat_proxies(bsym.output))):
            return False
        results = [r for r, p in zip(results, flat_proxies(bsym.output), strict=True) if isinstance(p, Proxy)]
        self.keep(bsym, outs, results, again, pure=versions == self.versions(bsym))
        return True

    def versions(self, bsym: BoundSymbol) -> list[int]:
        """Return how often each tensor that a symbol reads has been written to."""
        read = [self.values[p.name] for p in bsym.flat_proxy_args]
        return [value._version for value in read if isinstance(value, torch.Tensor)]

    def keep(
        self, bsym: BoundSymbol, outs: Sequence[Proxy], results: Sequence[Any], again: Callable[..., Any], *, pure: bool
    ) -> None:
        """Remember what a symbol made."""
        for proxy, value in zip(outs, results, strict=True):
            self.values[proxy.name] = value
            self.made[proxy.name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        ins = tuple(dict.fromkeys(p.name for p in bsym.flat_proxy_args))
        self.steps.append(_Step(bsym.sym.name, source_of(bsym), ins, tuple(p.name for p in outs), again, pure))

    def execute_parts(self, bsym: BoundSymbol, random: bool) -> None:
        """Run the parts of a symbol; a part that draws makes what the joint trace drew."""
        outs = [p for p in flat_proxies(bsym.output) if isinstance(p, Proxy)]
        if random and not bsym.subsymbols:
            for proxy in outs:
                self.values[proxy.name] = self.drawn[self.names.get(proxy.name, proxy.name)]
        elif bsym.subsymbols:
            for part in bsym.subsymbols:
                self.execute(part)
        else:
            trace = TraceCtx(None)
            with tracectx(trace):
                ops = Claims(self.executors, trace).claim(bsym)

            def again(values: Mapping[str, Any]) -> Any:
                return run_ops(ops, dict(values), to_vars(bsym.output))

            results = [v for v, p in zip(leaves(again(self.values)), flat_proxies(bsym.output), strict=True)
                       if isinstance(p, Proxy)]
            self.keep(bsym, outs, results, again, pure=not any(op.writes for op in ops))

    # finding what is wrong

    def locate(self, outcome: Outcome, program: Program) -> tuple[Op | None, str]:
        """Return the first op whose value, or gradient, is not that of torch."""
        ops = list(flat_ops(program.forward))
        for op in ops:
            for name in op.outs:
                if op.phase is Phase.FW and name in self.made and name in outcome.values:
                    how = difference(outcome.values[name], self.made[name], OTHER_CODE)
                    if how is not None:
                        return op, f"%{name}: {how}"
        return self.wrong_gradient(outcome, ops) if outcome.grads is not None else (None, "no op differs")

    def wrong_gradient(self, outcome: Outcome, ops: Sequence[Op]) -> tuple[Op | None, str]:
        """Return the first backward op that gives a value another gradient than torch's autograd does."""
        backward = [op for op in ops if op.phase is Phase.BW]
        totals: dict[str, torch.Tensor] = {}
        for step in reversed(self.steps):
            for name, grad in self.contributions(step):
                total = totals[name] = totals[name] + grad if name in totals else grad
                named = [(op, n) for op in backward for n in op.outs if _is_gradient(n, self.names.get(name, name))]
                # a rule that hands a cotangent on, or names it otherwise, makes no value of that name
                made = [n for _, n in named] or [n for op in backward for n in op.outs]
                if _any_close([outcome.values.get(n) for n in made], (grad, total)) or _any_close(
                        self.cotangents_of(step), (grad,)):
                    continue
                note = f"the gradient that {step.name} gives %{name} is not torch's"
                here = [(op, n) for op, n in named if _same_line(op.source, step.source)]
                if here:
                    op, n = here[0]
                    return op, f"{note}: %{n}: {difference(outcome.values[n], grad, OTHER_CODE)}"
                line = next((op for op in backward if _same_line(op.source, step.source)), None)
                return line or next((op for op in ops if set(op.outs) & set(step.outs)), None), note
        return None, "no op differs"

    def cotangents_of(self, step: _Step) -> list[Any]:
        """Return torch's gradients of what a step made, where it has one."""
        outs = [self.values[name] for name in step.outs]
        return self.gradients(self.outputs, [*filter(_tracked, outs)])

    def contributions(self, step: _Step) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what torch's autograd gives each operand of a step, from the true cotangents of its results."""
        cotangents = self.cotangents_of(step) if step.pure else []
        if all(c is None for c in cotangents):
            return
        ins = {name: self.values[name] for name in step.ins}
        tracked = {name: v.detach().requires_grad_() for name, v in ins.items() if _tracked(v)}
        with torch.enable_grad():
            made = filter(_tracked, leaves(step.again({**ins, **tracked})))
        roots, seeds = zip(*((m, c) for m, c in zip(made, cotangents, strict=False) if c is not None), strict=True)
        grads = torch.autograd.grad(roots, [*tracked.values()], seeds, allow_unused=True)
        yield from ((name, grad) for name, grad in zip(tracked, grads, strict=True) if grad is not None)


@functools.cache
def torch_functions(identity: Any) -> tuple[Callable[..., Any], ...]:
    """Return the torch functions that a thunder symbol may be called after, such as `torch.nn.functional.gelu`."""
    if not isinstance(identity, str) or not identity.startswith("torch."):
        return ()
    found: Any = torch
    for part in identity.split(".")[1:]:
        found = getattr(found, part, None)
    functional = getattr(torch.nn.functional, identity.rpartition(".")[2], None)
    return tuple(fn for fn in dict.fromkeys((found, functional)) if callable(fn))


def _tracked(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _any_close(values: Sequence[Any], wanted: Sequence[torch.Tensor]) -> bool:
    return any(difference(value, right, OTHER_CODE) is None for value in values for right in wanted)


def _to_torch(leaf: Any) -> Any:
    if isinstance(leaf, dtypes.dtype):
        return dtypes.to_torch_dtype(leaf)
    return devices.to_torch_device(leaf) if isinstance(leaf, devices.Device) else leaf


def _is_gradient(name: str, of: str) -> bool:
    return name == f"d_{of}" or (name.startswith(f"d_{of}_") and name[len(of) + 3:].isdigit())


def _same_line(a: Source | None, b: Source | None) -> bool:
    return a is not None and b is not None and (a.file, a.line) == (b.file, b.line)
