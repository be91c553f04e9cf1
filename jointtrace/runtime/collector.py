"""collector: keep Python's cyclic garbage collector out of a compilation.

A compilation makes many objects and hardly any cycles. A full collection in the middle of it walks all of torch and
thunder, 0.3 s and more (`benchmarks/passes.py`), as often as the new objects trigger one.
"""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Turn the cyclic collector off meanwhile, where it was on."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
