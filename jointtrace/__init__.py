"""jointtrace: a joint forward-backward trace compiler for PyTorch and lightning-thunder.

Importing it is light and touches neither torch nor thunder; thunder is repaired and extended when it is imported.
"""
from __future__ import annotations

from importlib.metadata import version
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from jointtrace.compat.importing import activate
from jointtrace.errors import JointtraceError, OptionError, UnsupportedError, VerifyError
from jointtrace.options import Options

if TYPE_CHECKING:
    from jointtrace.compiler import compile
    from jointtrace.reporting.api import dump, report

__version__ = version("jointtrace")
__all__ = ["JointtraceError", "OptionError", "Options", "UnsupportedError", "VerifyError", "compile", "dump", "report"]

_LATER = {  # they import torch
    "compile": "jointtrace.compiler:compile",
    "dump": "jointtrace.reporting.api:dump",
    "report": "jointtrace.reporting.api:report",
}

activate()


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'jointtrace' has no attribute {name!r}")
    return resolve_name(_LATER[name])
