"""nvfuser: regions through thunder's translation of its symbols to nvFuser (CUDA only, thunder 0.2.6)."""
from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence

import torch

from jointtrace.errors import UnsupportedError
from jointtrace.executors.base import Compiled
from jointtrace.executors.thunder_fusion import ThunderFusionExecutor
from jointtrace.ir.op import Op, Type

MODULE = "nvfuser_direct"


class NvfuserExecutor:
    """thunder's nvFuser executor, looked up when it is first needed."""

    name = "nvfuser"
    fuses = True

    def unavailable(self) -> str | None:
        """Return what is missing: a CUDA device, nvFuser for this torch, or thunder's consent to its version."""
        if not torch.cuda.is_available():
            return "nvFuser needs a CUDA device, and torch sees none"
        if importlib.util.find_spec(MODULE) is None:
            return (
                f"module {MODULE} is missing; NVIDIA publishes it for torch 2.10 on Python 3.10 and 3.12 "
                f"(pip install 'jointtrace[nvfuser]'), and this is torch {torch.__version__}"
            )
        return None if _thunder_executor() is not None else f"thunder does not accept the installed {MODULE}"

    def can_run(self, op: Op, types: Mapping[str, Type]) -> bool:
        """What thunder's nvFuser executor can fuse."""
        return self._adapted().can_run(op, types)

    def wants(self, ops: Sequence[Op]) -> bool:
        """A group that saves something."""
        return self._adapted().wants(ops)

    def compile(self, region: Op) -> Compiled:
        """Translate the region to one nvFuser definition."""
        return self._adapted().compile(region)

    def _adapted(self) -> ThunderFusionExecutor:
        executor = _thunder_executor()
        if executor is None:
            raise UnsupportedError(f"executor 'nvfuser' is unavailable: {self.unavailable()}")
        return executor


@functools.cache
def _thunder_executor() -> ThunderFusionExecutor | None:
    from thunder.executors.nvfuserex import nvfuserex

    return None if nvfuserex is None else ThunderFusionExecutor(nvfuserex)
