"""build_joint: one joint forward-backward trace of a thunder computation trace, in one walk.

Requires  a thunder trace whose return is {"output": ..., "flat_args": ...}, before executors have claimed anything.
Ensures   a `Trace` with claimed ops only: forward first, then backward; one GET_GRAD per differentiable output
          position; a gradient for each input that requires one and can have one; RECOMPUTE on what a checkpoint covers.
Cost      linear in the ops of the joint trace; gradient rules run once per distinct call.

Reverse-mode accumulation over a list of local backward programs, as in Griewank and Walther, Evaluating Derivatives
(2008).
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.dtypes import is_inexact_dtype, to_dtype
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transforms import is_constant_for_vjp
from thunder.extend import Executor
from thunder.transforms.autocast import disable_autocast

from jointtrace.errors import UnsupportedError, VerifyError
from jointtrace.ir.op import Op, Phase, Source, Tag, Target, TensorType, Type, Var
from jointtrace.ir.trace import Trace
from jointtrace.joint.alias import Aliases, writes
from jointtrace.joint.expand import Get, Put, Rest, Template, call_key, expand, is_library_symbol, merged, rule_of
from jointtrace.joint.limits import check_rule
from jointtrace.joint.overwritten import keep_overwritten, spread
from jointtrace.joint.places import repeated
from jointtrace.joint.symbols import IN_CHECKPOINT, flat_proxies, proxy_of, source_of, type_of, where

SKIPPED = frozenset({prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.COMMENT, prims.PrimIDs.DEL})
STEPS = frozenset({prims.PrimIDs.FLOOR, prims.PrimIDs.CEIL, prims.PrimIDs.ROUND, prims.PrimIDs.TRUNC,
                   ltorch.bernoulli.id})
EFFECTS = frozenset({Tag.MUTATES, Tag.COLLECTIVE, Tag.OPAQUE})
Step = Op | Get | Put | Rest


@dataclass(frozen=True)
class Written:
    """The arguments that are written to in place.

    Attributes:
        arguments: all of them; they must share memory with no other argument but those in `repeated`.
        differentiable: those that hold a value with a gradient in the end; they must be no leaves that require one.
        positions: where these are among the outputs of the joint trace.
        repeated: by argument an earlier one that must be the same tensor.
    """

    arguments: tuple[str, ...]
    differentiable: tuple[str, ...]
    positions: frozenset[int]
    repeated: Mapping[str, str]


@dataclass(frozen=True)
class Joint:
    """The joint trace and what thunder must know of it.

    Attributes:
        trace: the joint trace; after thunder's flat outputs it returns written arguments that are not among them.
        names: what thunder's values are called in it, where not as in thunder's trace.
        differentiable: which of its outputs have a gradient.
        depends: for each input the positions of the outputs whose cotangents reach it in eager, be it as mere zeros:
            where none of them exists there is no gradient.
        written: the arguments that are written to.
    """

    trace: Trace
    names: dict[str, str]
    differentiable: tuple[bool, ...]
    depends: tuple[frozenset[int], ...]
    written: Written


def build_joint(computation: TraceCtx, executors: Sequence[Executor], *, gradients: bool = True) -> Joint:
    """Return the joint trace of a thunder computation trace.

    Args:
        computation: thunder's trace of the user's program.
        executors: thunder executors in order of preference; the first that can run a symbol claims it.
        gradients: False builds the forward alone.

    Raises:
        UnsupportedError: an op without a gradient rule or an executor; names the op and the user's file and line.
    """
    walk = Walk(computation, executors, gradients)
    with disable_autocast():  # the trace has what it casts, and gradient rules compute in the types they meet
        walk.forward()
        return walk.finish()


class Walk:
    """The state of one walk over a computation trace."""

    def __init__(self, computation: TraceCtx, executors: Sequence[Executor], gradients: bool) -> None:
        self.computation = computation
        self.executors = executors
        self.gradients = gradients
        self.inputs = [p for p in flat_proxies((computation.args, computation.kwargs)) if isinstance(p, Proxy)]
        self.types: dict[str, Type] = {p.name: type_of(p) for p in self.inputs}
        self.arguments = frozenset(self.types)
        self.needs: set[str] = set()  # values with a gradient
        if gradients:
            self.needs = {p.name for p in self.inputs if isinstance(p, TensorProxy) and p.requires_grad}
        self.names: dict[str, str] = {}  # thunder's name -> the name of the same value here
        self.ops: list[Op] = []
        self.backward: list[list[Step]] = []
        self.grads: dict[str, str] = {}
        self.reached: dict[str, int] = {}  # bits: the outputs whose cotangents reach a value, be it as mere zeros
        self.kept: set[str] = set()  # results of checkpoints
        self.templates: dict[Any, Template] = {}
        self.used: set[str] = {*self.types, *computation.names}
        self.counts: dict[str, int] = {}
        self.aliases = Aliases(self)
        self.repeated = repeated(self.inputs) if self.aliases.active else {}
        self.names.update(self.repeated)

    # forward

    def forward(self) -> None:
        """Process the computation's symbols in order, decomposing what has no gradient rule of its own."""
        queue: deque[Any] = deque(self.computation.bound_symbols[:-1])
        while queue:
            bsym = queue.popleft()
            if bsym.sym.id not in SKIPPED:
                queue.extendleft(reversed(self.process(bsym)))

    def process(self, bsym: BoundSymbol) -> list[BoundSymbol]:
        """Add the ops of one symbol; return what to process in its stead, where it is to be decomposed."""
        if bsym.sym == ltorch.checkpoint:
            return self.checkpoint(bsym)
        bsym = self.recomputed(bsym)
        if self.aliases.active:
            self.aliases.read(bsym.flat_proxy_args)
            if writes(bsym):
                return self.aliases.process(bsym)
        view = self.aliases.note_view(bsym)
        if not self.is_differentiable(bsym):
            self.instantiate(bsym, self.template(bsym, None, True), view=view)
            self.let_nothing_through(bsym)
            return []
        self.mark_differentiable(bsym)
        rule, shareable = rule_of(bsym)
        if rule is not None:
            check_rule(bsym)
            self.instantiate(bsym, self.template(bsym, rule, shareable), view=view)
            return []
        if bsym.sym.is_prim or not bsym.subsymbols:
            if not bsym.sym.is_prim and not bsym.flat_proxy_outs:
                return []
            raise UnsupportedError(f"no gradient rule for {bsym.sym.name} ({where(bsym) or 'no source known'}); "
                                   "register one with an executor (thunder.extend), or detach its operands")
        return [sub.from_bsym(tags=sub.tags | bsym.tags) if bsym.tags else sub for sub in bsym.subsymbols]

    def is_differentiable(self, bsym: BoundSymbol) -> bool:
        """Whether a gradient flows through a symbol."""
        if bsym.sym.name == "detach" or not any(self.name(p) in self.needs for p in bsym.flat_proxy_args):
            return False
        if bsym.sym.id in STEPS or (bsym.flat_proxy_outs and not any(map(_may_have_gradient, bsym.flat_proxy_outs))):
            return False
        return not is_constant_for_vjp(bsym)

    def let_nothing_through(self, bsym: BoundSymbol) -> None:
        """Give the operand of a step function zeros for a gradient, as eager does; thunder's rules give none."""
        if bsym.sym.id not in STEPS:
            return
        operand, out = self.name(bsym.args[0]), bsym.output.name
        if operand in self.needs and self.is_float(operand) and self.is_float(out):
            self.needs.add(out)
            self.backward.append([Rest(out, operand)])

    def mark_differentiable(self, bsym: BoundSymbol) -> None:
        """Tell the operands of a symbol whether they have a gradient: rules are chosen by it, and thunder forgets."""
        for proxy in bsym.flat_proxy_args:
            if isinstance(proxy, TensorProxy):
                proxy._requires_grad = self.name(proxy) in self.needs

    def checkpoint(self, bsym: BoundSymbol) -> list[BoundSymbol]:
        """Tag what a checkpoint covers for recomputation; what it returns is kept for the program outside."""
        if BoundSymbolTag.RECOMPUTE_IN_BACKWARD not in bsym.tags:  # else it is part of another checkpoint
            given = {p.name for p in bsym.flat_proxy_args}
            self.kept.update(p.name for p in bsym.flat_proxy_outs if p.name not in given)
        return [sub.from_bsym(tags=sub.tags | {BoundSymbolTag.RECOMPUTE_IN_BACKWARD}) for sub in bsym.subsymbols]

    def recomputed(self, bsym: BoundSymbol) -> BoundSymbol:
        """Return a symbol tagged for recomputation where it stands in a checkpoint that thunder has dissolved."""
        tagged = [ProxyTag.RECOMPUTE_IN_BACKWARD in p.tags for p in bsym.flat_proxy_outs]
        if not any(tagged) and IN_CHECKPOINT not in bsym.tags:
            return bsym
        if IN_CHECKPOINT in bsym.tags:
            self.kept.update(p.name for p, inside in zip(bsym.flat_proxy_outs, tagged, strict=True) if not inside)
        return bsym.from_bsym(tags=(bsym.tags - {IN_CHECKPOINT}) | {BoundSymbolTag.RECOMPUTE_IN_BACKWARD})

    def template(self, bsym: BoundSymbol, rule: Callable[..., Any] | None, shareable: bool) -> Template:
        """Return the expansion of a symbol, shared with every equal call."""
        tags = frozenset({Tag.RECOMPUTE}) if BoundSymbolTag.RECOMPUTE_IN_BACKWARD in bsym.tags else frozenset()
        bsym = merged(bsym, self.names)
        if not (shareable and is_library_symbol(bsym)):
            return expand(bsym, rule, self.executors, tags)
        key = (call_key(bsym, self.names)[0], rule is None)
        template = self.templates.get(key)
        if template is None:
            template = expand(bsym, rule, self.executors, tags)
            if template.shareable:
                self.templates[key] = template
        return template

    def instantiate(self, bsym: BoundSymbol, template: Template, *, view: bool = False) -> None:
        """Add a template's forward ops under the names of this call, and remember its backward."""
        operands = call_key(bsym, self.names)[1]
        outs = tuple(p.name for p in bsym.flat_proxy_outs)
        names = dict(zip(template.inputs, operands, strict=False))
        names.update((old, new) for old, new in zip(template.outputs, outs, strict=True) if old not in names)
        source = None if not template.forward else source_of(bsym)
        for op in template.forward:
            op = self.renamed(op, template, names)
            tags = op.tags if self.kept.isdisjoint(op.outs) else op.tags - {Tag.RECOMPUTE}
            if view and not set(op.outs).isdisjoint(outs):
                tags |= {Tag.VIEW}
            self.ops.append(op.replace(source=source, tags=tags))
        if not template.backward:
            return
        late = source and replace(source, op=bsym.sym.name)
        wishes = {step.grad: f"d_{names.get(step.to, step.to)}" for step in template.backward if isinstance(step, Put)}
        self.backward.append(
            [self.renamed(step, template, names, wishes).replace(source=late) if isinstance(step, Op)
             else self._renamed_end(step, names) for step in template.backward])
        if any(isinstance(step, Put) and step.to in self.needs for step in self.backward[-1]):
            read = {step.of for step in self.backward[-1] if isinstance(step, Get)}
            self.needs.update(name for name in outs if self.is_float(name) and name in read)
        else:
            self.backward.pop()

    def renamed(self, op: Op, template: Template, names: dict[str, str], wishes: Mapping[str, str] | None = None) -> Op:
        """Return a template's op under new names, its values registered; `wishes` proposes names."""
        for name in op.outs:
            new = names.get(name)
            if new is None:
                new = names[name] = self.fresh(wishes.get(name, name) if wishes else name)
            self.types[new] = template.types[name]
        return op.rename_inputs(names).rename_outputs(names)

    def _renamed_end(self, step: Get | Put, names: dict[str, str]) -> Get | Put:
        if isinstance(step, Put):
            return Put(names.get(step.to, step.to), names.get(step.grad, step.grad))
        of = names.get(step.of, step.of)
        names[step.grad] = f"cotangent of {of}"  # stands for a name until the cotangent is known
        return Get(of, names[step.grad])

    # backward

    def finish(self) -> Joint:
        """Accumulate the cotangents from the outputs back to the inputs and return the joint trace."""
        outputs = flat_proxies(self.computation.bound_symbols[-1].args[0]["output"])
        self.aliases.read(outputs)
        flat = tuple(Var(self.name(o)) if isinstance(o, Proxy) else o for o in outputs)
        histories = self.aliases.histories()
        flat += tuple(Var(name) for name in histories.values() if Var(name) not in flat)
        differentiable = tuple(isinstance(o, Var) and o.name in self.needs for o in flat)
        for position, out in enumerate(flat):
            if differentiable[position]:
                self.seed(out.name, position)
        for chunk in reversed(self.backward):
            self.pull_back(chunk)
        for name in (p.name for p in self.inputs if p.name in self.reached and p.name not in self.grads):
            self.grads[name] = self.zeros(name)
        grads = tuple(
            Var(self.grads[p.name]) if p.name in self.needs and p.name in self.grads else None for p in self.inputs
        )
        trace = Trace(tuple(p.name for p in self.inputs), (), flat, grads, self.types)
        trace = keep_overwritten(trace.rebuild(placed(live(self.ops, grads)), by="build_joint"))
        written = Written(self.aliases.written_arguments(), tuple(histories), frozenset(
            position for position, out in enumerate(flat) if isinstance(out, Var) and out.name in histories.values()),
            self.repeated)
        depends = tuple(frozenset(i for i in range(len(flat)) if grad and self.reached.get(p.name, 0) >> i & 1)
                        for p, grad in zip(self.inputs, grads, strict=True))
        return Joint(trace, self.names, differentiable, depends, written)

    def seed(self, name: str, position: int) -> None:
        """Read the cotangent of an output position."""
        grad = self.fresh(f"d_{name}")
        self.types[grad] = self.types[name]
        self.ops.append(Op(Target("get_grad"), (Var(name), position), out=Var(grad), tags=frozenset({Tag.GET_GRAD}),
                           phase=Phase.BW))
        self.reached[name] = self.reached.get(name, 0) | 1 << position
        self.accumulate(name, grad)

    def accumulate(self, name: str, grad: str) -> None:
        """Add `grad` to the cotangent of `name`."""
        grad = self.fitted(grad, name)
        held = self.grads.get(name)
        self.grads[name] = grad if held is None else self.emit(ltorch.add, held, grad, like=name)

    def fitted(self, grad: str, name: str) -> str:
        """Return `grad` in shape and dtype of `name`: thunder's rules take a 0-dimensional tensor for a number."""
        kind, wanted = self.types[grad], self.types[name]
        assert isinstance(kind, TensorType)
        assert isinstance(wanted, TensorType)
        if kind.shape != wanted.shape:
            if wanted.shape:
                raise VerifyError(f"a gradient rule gives %{name} of shape {wanted.shape} a cotangent of {kind.shape}")
            grad = self.emit(ltorch.sum, grad, like=name)
        if kind.dtype != wanted.dtype:
            grad = self.emit(lambda g: ltorch.to(g, to_dtype(wanted.dtype)), grad, like=name)
        return grad

    def pull_back(self, chunk: Sequence[Step]) -> None:
        """Add one symbol's backward, if any of its results has a cotangent."""
        spread(chunk, self.reached, self.needs)
        if not any(isinstance(step, Get) and step.of in self.grads for step in chunk):
            return
        names: dict[str, str] = {}
        for step in chunk:
            if isinstance(step, Op):
                self.ops.append(step.rename_inputs(names))
            elif isinstance(step, Get):
                names[step.grad] = self.grads[step.of] if step.of in self.grads else self.zeros(step.of)
            elif isinstance(step, Put) and step.to in self.needs:
                self.accumulate(step.to, names.get(step.grad, step.grad))

    def zeros(self, name: str) -> str:
        """Return zeros of the type of `name`: the cotangent of a result that nothing differentiable uses."""
        kind = self.types[name]
        assert isinstance(kind, TensorType)
        return self.emit(lambda p: ltorch.zeros(p._shape, device=p.device, dtype=p.dtype), name, like=name)

    def emit(self, fn: Callable[..., Any], *operands: str, like: str) -> str:
        """Add the backward ops of `fn`, a function of thunder proxies, on some values; return its result."""
        trace = TraceCtx(None)
        with tracectx(trace):
            proxies = {name: proxy_of(name, self.types[name]) for name in dict.fromkeys(operands)}
            trace.push_scope([])
            fn(*(proxies[name] for name in operands))
            (bsym,) = trace.pop_scope()
        out = self.fresh(f"d_{like}")
        template = self.template(bsym, None, True)
        names = dict(zip(template.inputs, call_key(bsym, {})[1], strict=False))
        names[template.outputs[0]] = out
        for op in template.forward:
            self.ops.append(self.renamed(op, template, names).replace(phase=Phase.BW))
        return out

    # names

    def name(self, proxy: Proxy) -> str:
        """Return the name that the value of a thunder proxy has here."""
        return self.names.get(proxy.name, proxy.name)

    def is_float(self, name: str) -> bool:
        """Whether a value is of a dtype that can have a gradient."""
        kind = self.types[name]
        return isinstance(kind, TensorType) and (kind.dtype.is_floating_point or kind.dtype.is_complex)

    def fresh(self, wish: str) -> str:
        """Return an unused name like `wish`."""
        name, count = wish, self.counts.get(wish, 0)
        while name in self.used:
            count += 1
            name = f"{wish}_{count}"
        self.counts[wish] = count
        self.used.add(name)
        return name




def _may_have_gradient(proxy: Proxy) -> bool:
    return isinstance(proxy, TensorProxy) and is_inexact_dtype(proxy.dtype)


def live(ops: Sequence[Op], grads: Sequence[Var | None]) -> list[Op]:
    """Return `ops` without the backward ops that no gradient needs: rules compute gradients of all operands."""
    needed = {grad.name for grad in grads if grad is not None}
    kept: list[Op] = []
    for op in reversed(ops):
        if op.phase is Phase.FW or op.tags & EFFECTS or needed.intersection(op.outs):
            needed.update(op.ins)
            kept.append(op)
    return kept[::-1]


def placed(ops: Sequence[Op]) -> list[Op]:
    """Return `ops` in which sums and casts of gradients have a source too: that of the gradient they add."""
    known: dict[str, Source] = {}
    found: list[Op] = []
    for op in ops:
        if op.phase is Phase.BW and op.source is None:
            op = op.replace(source=next((known[name] for name in reversed(op.ins) if name in known), None))
        if op.source is not None and op.source.op:
            known.update(dict.fromkeys(op.outs, op.source))
        found.append(op)
    return found
