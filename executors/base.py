"""What an executor must offer: the protocol through which regions are claimed and compiled."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jointtrace.ir.op import Op, Tag, Type

MIN_COMPUTING_OPS = 2
"""A region saves launches and memory traffic between ops; around one op (views move no memory) there are none to save,
and its own call costs more than the op's."""

Compiled = Callable[..., tuple[Any, ...]]


@runtime_checkable
class Executor(Protocol):
    """Runs ops one by one, or compiles groups of them.

    Attributes:
        name: what a user writes in `executors=(...)`.
        fuses: True where it compiles regions; False where the ops it claims simply run as they are.
    """

    name: str
    fuses: bool

    def unavailable(self) -> str | None:
        """Return why it can't run on this machine and what to do about it; None where it can."""
        ...

    def can_run(self, op: Op, types: Mapping[str, Type]) -> bool:
        """Whether it can run `op`, which no tag forbids to fuse; `types` has the types of what it reads and makes."""
        ...

    def wants(self, ops: Sequence[Op]) -> bool:
        """Whether the group `ops`, all of which it can run, is worth compiling; a group it leaves runs eagerly."""
        ...

    def compile(self, region: Op) -> Compiled:
        """Return a callable for `region.body`: the region's inputs positionally in, a tuple of its outputs out.

        It is called with gradients and autocast off, from any thread. It may have an attribute `boxed`: the same with
        ONE list of inputs, which it empties, so that an input can be freed while the region still runs.
        """
        ...


def gains(ops: Sequence[Op]) -> bool:
    """Whether a region of `ops` has anything to save."""
    return sum(Tag.VIEW not in op.tags for op in ops) >= MIN_COMPUTING_OPS
