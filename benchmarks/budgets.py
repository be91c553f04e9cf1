"""What `recompute` plans under a memory budget; only the passes run, nothing is compiled."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from models import Workload
from torch.fx import GraphModule

from jointtrace.executors.registry import resolve
from jointtrace.frontends.aot import Session
from jointtrace.ir.fx import to_trace
from jointtrace.ir.memory import plan_memory
from jointtrace.ir.trace import Trace
from jointtrace.options import Options
from jointtrace.pipeline import in_loops, run


class _Seen(Exception):
    """Ends a compilation when its joint trace is there."""


class _Joint(Session):
    """A compilation that ends with the joint trace."""

    found: Trace | None = None

    def partition(self, joint: GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any) -> NoReturn:
        joint.graph.eliminate_dead_code()
        self.found = self.noted(to_trace(joint, num_fwd_outputs).trace)
        raise _Seen


def joint_of(workload: Workload, executor: str) -> Trace:
    """Return the joint trace that the torch.compile front end would make of a model for `executor`."""
    module, inputs = workload
    session = _Joint(Options.parse({"executors": (executor,)}))
    torch._dynamo.reset()
    try:
        torch.compile(module, backend=session.compile, fullgraph=True, dynamic=False)(*inputs)
    except Exception:  # Dynamo and AOTAutograd put their own around ours
        if session.found is None:
            raise
    assert session.found is not None
    return session.found


@dataclass(frozen=True)
class Planned:
    """The plan under one budget: its peak, what it keeps of what the forward made, what the pass took."""

    budget: float
    peak_bytes: int
    seconds: float


def planned(joint: Trace, executor: str, budget: float) -> Planned:
    """Return what the passes plan for a joint trace under a budget in [0, 1]."""
    executors = resolve((executor,))
    stages = run(joint, Options.parse({"executors": (executor,), "memory_budget": budget}), executors).stages
    at = next(i for i, stage in enumerate(stages) if stage.name == "recompute")
    after = stages[at + 1]
    assert after.name == "dce", after.name
    return Planned(budget, plan_memory(after.trace, in_loops(after.trace, executors)).peak_bytes, stages[at].seconds)
