"""program: what a stage of a compilation computes, one joint trace or two halves, in one form."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jointtrace.checking.interpret import Interpreter, copies, has_effects
from jointtrace.ir.op import Tag, Var
from jointtrace.ir.trace import Trace

if TYPE_CHECKING:
    from jointtrace.pipeline import Stage


@dataclass(frozen=True)
class Outcome:
    """What a program computed: outputs, gradients (None before the backward ran), and its inputs as it left them.

    `values` has all values by name, where they were kept; `requires_grad` says it of each output, where that is known.
    """

    outputs: list[Any]
    grads: list[Any] | None
    inputs: list[Any]
    values: Mapping[str, Any] = field(default_factory=dict)
    requires_grad: tuple[bool, ...] | None = None

    def parts(self, names: Sequence[str]) -> Iterator[tuple[str, int, Any]]:
        """Yield (what it is, position, value) of everything that can be seen from outside; `names` are the inputs'."""
        for position, value in enumerate(self.outputs):
            yield f"output {position}", position, value
        for position, (name, value) in enumerate(zip(names, self.inputs, strict=True)):
            yield f"input {name} after the call", position, value
        for position, (name, value) in enumerate(zip(names, self.grads or (), strict=False)):
            yield f"gradient of input {name}", position, value


@dataclass(frozen=True)
class Program:
    """The program after one stage.

    Attributes:
        stage: the pass that made it.
        forward: the joint trace, or the forward half, whose outputs from `num_outputs` on are handed to the backward.
        backward: the backward half.
        handed: for each of the backward's first inputs the position among the forward's outputs.
        cotangents: for each further input of the backward the output position whose cotangent it is.
    """

    stage: str
    forward: Trace
    num_outputs: int
    backward: Trace | None = None
    handed: tuple[int, ...] = ()
    cotangents: tuple[int, ...] = ()

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The one trace, or the two halves."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    def run(
        self, inputs: Sequence[Any], cotangents: Mapping[int, Any] | None = None, *, keep: bool = False,
        drawn: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Interpret the program, on copies where it writes; without cotangents the forward alone.

        RANDOM ops make what is `drawn`, by name, or else draw from seeds by name.
        """
        if any(map(has_effects, self.traces)):
            inputs = copies(inputs)
            cotangents = cotangents and dict(zip(cotangents, copies([*cotangents.values()]), strict=True))
        interpreter = Interpreter(keep=keep, drawn=drawn or {})
        values = dict(zip(self.forward.inputs, inputs, strict=True))
        made = interpreter.run(self.forward, values, cotangents)
        results = [_read(leaf, values) for leaf in self.forward.outputs]
        grads = None
        if cotangents is not None:
            grads = [_read(leaf, values) for leaf in self.forward.grads]
            if self.backward is not None:
                given = [results[i] for i in self.handed] + [cotangents[i] for i in self.cotangents]
                values = dict(zip(self.backward.inputs, given, strict=True))
                made = {**interpreter.run(self.backward, values, {}), **made}
                grads = [_read(leaf, values) for leaf in self.backward.outputs]
        return Outcome(results[: self.num_outputs], grads, list(inputs), made)


def _read(leaf: Any, values: Mapping[str, Any]) -> Any:
    return values[leaf.name] if isinstance(leaf, Var) else leaf


def programs(stages: Sequence[Stage]) -> list[Program]:
    """Return the program after each stage of a compilation, the first one as the joint trace came."""
    found: list[Program] = []
    count = len(stages[0].trace.outputs)
    for stage in stages:
        name, trace = stage.name, stage.trace
        if name == "split_forward":
            if len(trace.outputs) == count and not any(s.name == "split_backward" for s in stages):
                found.append(Program("split", trace, count))
            split = trace
        elif name == "split_backward":
            saved = len(split.outputs) - count
            handed = tuple(range(count, count + saved))
            found.append(Program("split", split, count, trace, handed, cotangents_of(found[-1])))
        elif name.endswith("_forward"):
            found.append(replace(found[-1], stage=name, forward=trace))
        elif name.endswith("_backward"):
            found.append(replace(found[-1], stage=name, backward=trace))
        else:
            found.append(Program(name, trace, count))
    return found



def cotangents_of(program: Program) -> tuple[int, ...]:
    """Return the output positions whose cotangents a joint trace reads, in order."""
    return tuple(sorted(op.args[1] for op in program.forward.ops if Tag.GET_GRAD in op.tags))
