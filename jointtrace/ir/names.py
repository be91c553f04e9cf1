"""Spelling of names, dtypes and types in trace text, shared by the printer and the parser."""
from __future__ import annotations

import re

import torch

KEYWORDS = frozenset({"trace", "with", "types", "fw", "bw", "return"})
WORD = re.compile(r"""[^\s'"()\[\]{},:=%\#]+""")
_PLAIN_DEVICE = re.compile(r"[A-Za-z_]\w*(:\d+)?")
_DTYPE_LETTERS = (
    (re.compile(r"^bool$"), "b8"),
    (re.compile(r"^bfloat"), "bf"),
    (re.compile(r"^float"), "f"),
    (re.compile(r"^uint"), "u"),
    (re.compile(r"^int"), "i"),
    (re.compile(r"^complex"), "c"),
)


def _abbreviate(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    for pattern, letters in _DTYPE_LETTERS:
        name = pattern.sub(letters, name)
    return name.replace("_", "")


DTYPE_ABBREVIATIONS = {value: _abbreviate(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
DTYPES = {short: dtype for dtype, short in DTYPE_ABBREVIATIONS.items()}
SCALAR_KINDS = frozenset({"int", "float", "bool", "complex"})


def quote(name: str) -> str:
    """Return `name` as it stands where it is one plain word of the text, else as a string literal."""
    plain = WORD.fullmatch(name) and name not in KEYWORDS and not name.startswith("$")
    return name if plain else repr(name)


def quote_device(device: str) -> str:
    """Return a device as it stands where it looks like one (`cuda:0`), else as a string literal."""
    return device if _PLAIN_DEVICE.fullmatch(device) else repr(device)
