"""expected: tests of thunder's that pass without jointtrace's option and fail with it, each with its reason.

Strict: an entry that is no longer a regression is an error.
"""
from __future__ import annotations

EXPECTED: dict[str, str] = {}
