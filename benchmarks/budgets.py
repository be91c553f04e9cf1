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
from jointtrace.passes.recompute import search
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
class Plans:
    """The planned peak under each budget, and what the pass took for the smallest one, which costs it most."""

    budgets: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    seconds: float


def plans(joint: Trace, executor: str, budgets: Sequence[float]) -> Plans:
    """Return what the passes plan for a joint trace under budgets in [0, 1].

    The pass runs for the smallest budget; what it searches through for that one holds for the others as well, and is
    asked for them here, as the pass would begin anew each time.
    """
    executors, smallest = resolve((executor,)), min(budgets)
    stages = run(joint, Options.parse({"executors": (executor,), "memory_budget": smallest}), executors).stages
    at = next(i for i, stage in enumerate(stages) if stage.name == "recompute")
    before, after = stages[at - 1].trace, stages[at + 1]
    fused = in_loops(before, executors)
    found = search(before, fused)
    peaks = {budget: found.at(budget).peak_bytes for budget in budgets}
    made = plan_memory(after.trace, in_loops(after.trace, executors)).peak_bytes
    if after.name != "dce" or made != peaks[smallest]:
        raise AssertionError(f"the pass planned {made} bytes, its search {peaks[smallest]}")
    return Plans(tuple(peaks), tuple(peaks.values()), stages[at].seconds)
