"""graph_check: the check of one graph that AOTAutograd handed over, told of each step by the front end."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from torch.fx import GraphModule

from jointtrace.checking.graph_reference import GraphReference
from jointtrace.checking.monitor import Monitor, Subject
from jointtrace.checking.program import Program, programs
from jointtrace.ir.op import Phase, Tag, Var
from jointtrace.ir.trace import Trace
from jointtrace.runtime.record import Record

OUR_OWN = ("fuse", "split_forward")  # stages that show what our split would give; AOTAutograd's is what runs

Boxed = Callable[[list[Any]], Any]


class GraphCheck:
    """What is known of a graph so far; a graph without gradients has no `joint` and runs as its stages say."""

    def __init__(self, record: Record, joint: GraphModule | None = None, trace: Trace | None = None) -> None:
        reference = None if joint is None or trace is None else GraphReference(joint, trace)
        labels = [] if joint is None or trace is None else _labels(joint, trace)
        self.subject = Subject(record, self.programs, reference, labels=labels)
        self.monitor = Monitor(self.subject)
        self.joint = joint is not None
        self.halves: dict[Phase, Trace] = {}

    def add_half(self, phase: Phase, trace: Trace) -> None:
        """Note a half as AOTAutograd hands it over."""
        self.halves[phase] = trace

    def watch(self, call: Boxed, linked: Trace, phase: Phase) -> Boxed:
        """Return `call`, which runs `linked`, such that its first run is checked."""
        if phase is Phase.FW:
            self.subject.forward = linked
            before, after = self.monitor.before_forward, self.monitor.after_forward
        else:
            self.subject.backward = linked
            before, after = self.monitor.before_backward, self.monitor.after_backward

        def watched(args: list[Any]) -> Any:
            if self.monitor.subject is None:
                return call(args)
            before(*args)
            results = call(args)
            after(*results)
            return results

        return watched

    def programs(self) -> list[Program]:
        """Return the program after each stage."""
        stages = self.subject.record.stages
        if not self.joint:
            return programs(stages)
        found = programs([*takewhile(lambda stage: stage.name not in OUR_OWN, stages)])
        for stage, halves in (("split", (self.halves.get(Phase.FW), self.halves.get(Phase.BW))),
                              ("fuse", (self.subject.forward, self.subject.backward))):
            forward, backward = halves
            if forward is not None:
                found.append(_of_halves(stage, found[0], forward, backward))
        return found


def _of_halves(stage: str, joint: Program, forward: Trace, backward: Trace | None) -> Program:
    """Return the program of two halves, which AOTAutograd wires by name."""
    if backward is None:
        return Program(stage, forward, joint.num_outputs)
    positions = {op.outs[0]: op.args[1] for op in joint.forward.ops if Tag.GET_GRAD in op.tags}
    saved = {leaf.name: i for i, leaf in enumerate(forward.outputs) if i >= joint.num_outputs and isinstance(leaf, Var)}
    handed = tuple(saved[name] for name in backward.inputs if name not in positions)
    cotangents = tuple(positions[name] for name in backward.inputs if name in positions)
    effects = len(joint.forward.grads) - len(backward.outputs)  # inputs that only order effects: no gradient for them
    backward = replace(backward, outputs=(*(None for _ in range(effects)), *backward.outputs))
    return Program(stage, forward, joint.num_outputs, backward, handed, cotangents)


def _labels(joint: GraphModule, trace: Trace) -> Sequence[str]:
    """Return what AOTAutograd says each input is, such as `self.weight`, behind its name."""
    said = {node.name: node.meta.get("desc") for node in joint.graph.find_nodes(op="placeholder")}
    known = {name: f" ({desc.expr()})" for name, desc in said.items() if hasattr(desc, "expr")}
    return [f"%{name}{known.get(name, '')}" for name in trace.inputs]
