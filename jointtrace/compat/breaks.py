"""breaks: the one table of what breaks between lightning-thunder 0.2.6 and torch, in the order it is repaired."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from jointtrace.compat import (
    autograd_function_operator,
    function_apply,
    lazy_graph_module,
    named_tensors,
    repeated_argument,
    several_results,
)
from jointtrace.compat.patching import Patch, is_applied
from jointtrace.compat.versions import torch_in


@dataclass(frozen=True)
class Break:
    """One break.

    Attributes:
        what: what goes wrong without us, in a phrase.
        torch: the torch versions it holds for (within those we support); empty: all.
        during_import: put around the import of thunder; leaves torch as it was.
        patches: stay in force once thunder is imported.
    """

    what: str
    torch: str
    during_import: Callable[[], AbstractContextManager[None]] | None = None
    patches: tuple[Patch, ...] = ()

    @property
    def holds(self) -> bool:
        """Say whether the installed torch is one that it holds for."""
        return torch_in(self.torch)

    @property
    def repaired(self) -> bool:
        """Say whether everything that outlasts the import is in force (thunder must be imported)."""
        return all(is_applied(patch) for patch in self.patches)


BREAKS = (
    Break("import: named-tensor methods are gone", named_tensors.TORCH, named_tensors.stubs),
    Break("autograd.Function.apply is a builtin", function_apply.TORCH, function_apply.python_apply,
          function_apply.PATCHES),
    Break("autograd_function_apply has other arguments", autograd_function_operator.TORCH,
          patches=autograd_function_operator.PATCHES),
    Break("split_module gives lazy graph modules", lazy_graph_module.TORCH, patches=lazy_graph_module.PATCHES),
    Break("autograd.Function.apply(x, x) fails", repeated_argument.TORCH, patches=repeated_argument.PATCHES),
    Break("autograd.Function with several results", several_results.TORCH, patches=several_results.PATCHES),
)
