"""origin: which part of the user's program Dynamo is compiling, and for whom.

Private to torch, 2.10 to 2.14: the names of the frames and attributes read here. Where one of them is missing a report
says less.
"""
from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch.fx import GraphModule

from jointtrace.reporting.dump import recording, write_program
from jointtrace.reporting.registry import INLINE, identity, registered
from jointtrace.runtime.record import Origin, Record

WRAPPER = "torch._dynamo.eval_frame"  # the module of the function that torch.compile returns; it calls `fn`
RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")


@contextmanager
def watched(record: Record, module: GraphModule) -> Iterator[None]:
    """Make `record`, that of the compilation of `module`, findable, and write its stages as they come."""
    record.origin = origin_of(module)
    with recording(record), registered(record, called()):
        write_program(record, module)
        yield


def called() -> Any:
    """Return what the user gave torch.compile and is being run now; None where a graph is compiled by other means."""
    frame = sys._getframe(1)
    while frame is not None:
        if "fn" in frame.f_code.co_freevars and frame.f_globals.get("__name__") == WRAPPER:
            return frame.f_locals.get("fn")
        frame = frame.f_back
    return None


def origin_of(module: GraphModule) -> Origin | None:
    """Return which part of the program the graph `module`, that is being compiled, stands for."""
    code = _code()
    if code is None:
        return None
    resumed = RESUMED.fullmatch(code.co_name)
    function = resumed[1] if resumed else code.co_name
    place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return Origin(_compile_id(), function, place, resumed is not None, _break(module), _again())


def _code() -> CodeType | None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        frame: Any = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None
    outer = identity(called())[1] if frame.f_globals.get("__name__") == INLINE else None
    return outer if isinstance(outer, CodeType) else frame.f_code


def _compile_id() -> str:
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


def _break(module: GraphModule) -> str:
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return ""
    frame = reason.user_stack[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno} ({reason.reason.splitlines()[0]})"


def _again() -> str:
    from torch._dynamo.utils import get_metrics_context

    reason = get_metrics_context()._metrics.get("recompile_reason")
    return reason.splitlines()[0] if reason else ""
