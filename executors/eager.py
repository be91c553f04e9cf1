"""eager: run every op as it stands. Always there; the reference for all others."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from jointtrace.executors.base import Compiled
from jointtrace.ir.op import Op, Type
from jointtrace.runtime.codegen import compile_trace


class EagerExecutor:
    """Claims any op and leaves it alone."""

    name = "eager"
    fuses = False

    def unavailable(self) -> str | None:
        """Never: it needs nothing but torch."""
        return None

    def can_run(self, op: Op, types: Mapping[str, Type]) -> bool:
        """Any op."""
        return True

    def wants(self, ops: Sequence[Op]) -> bool:
        """No group: it makes no regions."""
        return False

    def compile(self, region: Op) -> Compiled:
        """Return the ops of `region` as one Python function, to compare another executor's region with."""
        if region.body is None:
            raise ValueError(f"{region.target.name} is no region")
        return compile_trace(region.body, region.target.name, boxed=False)
