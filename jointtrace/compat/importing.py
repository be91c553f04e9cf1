"""importing: watch for the first import of thunder, repair it on torch, then attach our front end.

`import jointtrace` stays light: thunder is neither imported nor touched until the program imports it. A thunder that
cannot be repaired fails to import; none is left half patched.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from jointtrace.compat.breaks import BREAKS, Break
from jointtrace.compat.patching import apply_patches, remove_patches
from jointtrace.compat.versions import check_supported

FRONT_END = "jointtrace.frontends.thunder_jit:install"  # by name: it imports thunder


def activate() -> None:
    """Check the versions, then repair thunder: at once where it is imported already, else when it will be.

    Raises:
        ImportError: torch or lightning-thunder has a version we do not work with, or thunder cannot be patched.
    """
    check_supported()
    if "thunder" in sys.modules:
        thunder = import_module("thunder")  # waits where another thread is importing it
        if getattr(thunder.__spec__, "_initializing", False):
            raise ImportError("jointtrace was imported from within the import of thunder: import one after the other")
        _attach()
        return
    _forget_thunder()
    if not any(isinstance(finder, _ThunderFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ThunderFinder())


class _ThunderFinder(MetaPathFinder):
    """Finds `thunder` as the finders after it do, and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "thunder":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ThunderLoader(spec.loader)
                return spec
        return None


class _ThunderLoader(Loader):
    """Loads thunder under the temporary repairs, then makes the lasting ones."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            with contextlib.ExitStack() as temporary:
                for found in _holding():
                    if found.during_import is not None:
                        temporary.enter_context(found.during_import())
                self._loader.exec_module(module)
            _attach()
        except BaseException:
            _forget_thunder()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _holding() -> list[Break]:
    return [found for found in BREAKS if found.holds]


def _attach() -> None:
    patches = [patch for found in _holding() for patch in found.patches]
    apply_patches(patches)
    try:
        resolve_name(FRONT_END)()
    except BaseException:
        remove_patches(patches)
        raise


def _forget_thunder() -> None:
    """Drop what a failed import left behind, so that the next one starts afresh."""
    left = [name for name in sys.modules if name.startswith("thunder.")]
    for name in left:
        del sys.modules[name]
    optree = sys.modules.get("optree")
    if left and optree is not None:
        for entry in optree.register_pytree_node.get(namespace="thunder").values():
            if entry.namespace == "thunder":  # a second registration of one type is an error
                optree.unregister_pytree_node(entry.type, namespace="thunder")
