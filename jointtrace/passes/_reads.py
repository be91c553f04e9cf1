"""Who needs which memory when, in a choice: views counted as what they are views of."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jointtrace.ir.facts import SHARING, uses
from jointtrace.ir.memory import alive_bytes, in_loop, plan_memory
from jointtrace.ir.op import Op, Phase, Tag
from jointtrace.passes._choice import Choice
from jointtrace.passes._save import HELD
from jointtrace.passes.dce import dce


class Reads:
    """Facts of a choice that no plan changes; positions are those of the trace.

    Attributes:
        first, last: for each value that the backward reads, itself or a view, the first and the last reader.
        forward: for each value the position that makes it and the last at which the forward keeps it alive.
        fixed: for each position the bytes alive whatever is kept or computed again.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._roots: dict[str, tuple[str, ...]] = {}
        self._uses = uses(choice.trace)
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        for position in range(choice.trace.boundary, len(choice.trace.ops) + 1):
            for name in self._read_at(position):
                for root in self.roots(name):
                    self.first.setdefault(root, position)
                    self.last[root] = position
        self.forward: dict[str, tuple[int, int]] = {}
        self.fixed = self._fixed()

    def is_view(self, name: str) -> bool:
        """Whether `name` is a view that costs nothing to make again."""
        op = self.choice.maker.get(name)
        return op is not None and bool(op.tags & SHARING) and name not in self.choice.why_kept

    def roots(self, name: str) -> tuple[str, ...]:
        """Return the values that must exist where `name` is read: none where the caller keeps its memory alive."""
        if name not in self._roots:
            if self.is_view(name):
                self._roots[name] = self.operands(self.choice.maker[name])
            else:
                held = name not in self.choice.maker or self.choice.nbytes[name] <= HELD
                self._roots[name] = () if held else (name,)
        return self._roots[name]

    def operands(self, op: Op) -> tuple[str, ...]:
        """Return the values that must exist for `op` to run."""
        return tuple(dict.fromkeys(root for name in op.ins for root in self.roots(name)))

    def is_real_again(self, name: str) -> bool:
        """Whether a copy of `name` would become memory, and not only pass between ops of compiled loops."""
        fused = self.choice.fused
        return not in_loop(self.choice.maker[name], fused) or any(
            not in_loop(reader, fused) for reader in self._readers_again(name))

    def passes_on(self, names: list[str], results: list[str]) -> bool:
        """Whether to keep `results`, which one op makes of `names` and nothing else reads, is never worse."""
        sizes = self.choice.nbytes
        larger = sum(sizes[name] for name in results) > sum(sizes[name] for name in names)
        return not larger and self.last.keys().isdisjoint(names) and self.choice.why_again.keys().isdisjoint(results)

    def _readers_again(self, name: str) -> Iterator[Op]:
        ops = self.choice.trace.ops
        for position in self._uses[name]:
            op = ops[position] if position < len(ops) else None
            if op is not None and op.tags & SHARING:
                yield from (reader for out in op.outs for reader in self._readers_again(out))
            elif op is not None and (op.phase is Phase.BW or not self.choice.why_kept.keys() >= set(op.outs)):
                yield op

    def _read_at(self, position: int) -> tuple[str, ...]:
        trace = self.choice.trace
        if position == len(trace.ops):
            names = trace.grad_names
        else:
            op = trace.ops[position]
            names = () if Tag.GET_GRAD in op.tags else op.ins
        return tuple(name for name in names if name in self.choice.nbytes)

    def _fixed(self) -> list[int]:
        trace = self.choice.trace
        begin = trace.boundary
        at = {name: position for position, op in enumerate(trace.ops[:begin]) for name in op.outs}
        # without what only the backward reads: where that is not kept, the forward does not make it
        forward = dce(trace.rebuild(trace.ops[:begin], by="", grads=()))
        whole = plan_memory(trace, self.choice.fused)
        held = [life for life in whole.lifetimes if life.start >= begin]
        natural = []
        for life in plan_memory(forward, self.choice.fused).lifetimes:
            end = at[forward.ops[life.end].outs[0]] if life.end < len(forward.ops) else begin
            natural.append(replace(life, start=at[life.name], end=end))
            self.forward[life.name] = at[life.name], end
            if end == begin:  # an output
                held.append(replace(natural[-1], end=len(trace.ops)))
        for name in self.choice.values:
            self.forward.setdefault(name, (at.get(name, 0), -1))
        return [*alive_bytes(natural, begin), *alive_bytes(held, len(trace.ops))[begin:]]
