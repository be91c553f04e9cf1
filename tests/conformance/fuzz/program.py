"""A generated torch program: what it is called with, its source in three forms, and its function.

The forms differ in random numbers alone:
- RECORDED draws them, and returns what it drew beside its results;
- REPLAYED is given them instead, so that eager PyTorch can run a program with the numbers a compiled one drew;
- BARE draws them and tells nobody.
"""
from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from textwrap import indent
from typing import Any

import torch

NUMBER = itertools.count()
PRELUDE = '''\
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y, g * x
'''


class Form(Enum):
    """How a program gets its random numbers."""

    RECORDED = "recorded"
    REPLAYED = "replayed"
    BARE = "bare"


@dataclass(frozen=True)
class Line:
    """One statement; where the forms differ, `replayed` and `bare` are its text in them (empty: it is left out)."""

    text: str
    replayed: str | None = None
    bare: str | None = None

    def of(self, form: Form) -> str:
        """Return the text in one form."""
        other = {Form.RECORDED: None, Form.REPLAYED: self.replayed, Form.BARE: self.bare}[form]
        return self.text if other is None else other


@dataclass(frozen=True)
class Input:
    """One tensor; `layout` is how it lies in memory, `history` says that it is no leaf."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    requires_grad: bool = True
    layout: str = "contiguous"
    history: bool = False

    def leaf(self, seed: int) -> torch.Tensor:
        """Return the tensor whose gradient is looked at."""
        generator = torch.Generator().manual_seed(seed)
        if not self.dtype.is_floating_point:
            return torch.randint(0, 3, self.shape, generator=generator)
        values = torch.randn(self.shape, dtype=self.dtype, generator=generator)
        return _laid_out(values, self.layout).requires_grad_(self.requires_grad)

    def argument(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return what the program is called with."""
        return leaf * 1 if self.history else leaf

    def __str__(self) -> str:
        """Return how the leaf is written in a script."""
        if not self.dtype.is_floating_point:
            return f"torch.randint(0, 3, {self.shape})"
        text = f"torch.randn({self.shape}, dtype={self.dtype})"
        if self.layout == "transposed":
            text = f"torch.randn({self.shape[::-1]}, dtype={self.dtype}).permute({[*range(len(self.shape))][::-1]})"
        elif self.layout == "strided":
            text = f"torch.randn({(*self.shape, 2)}, dtype={self.dtype})[..., 0]"
        return f"{text}.requires_grad_()" if self.requires_grad else text


def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed":
        order = [*range(values.ndim)][::-1]
        return values.permute(order).contiguous().permute(order)
    if layout == "strided":
        return torch.stack((values, values), -1)[..., 0]
    return values


@dataclass(frozen=True)
class Program:
    """A program, its arguments, and what is differentiated.

    Attributes:
        inputs: the tensors it is called with.
        arguments: which of them stands where: one may stand in two places.
        lines: its body.
        outputs, records: names of its results, and of what it drew.
        cotangents: for each output whether it gets one; "expanded" is one of stride 0.
        smooth: whether its gradient is what differences of its results say; then it is not compared with eager.
    """

    inputs: tuple[Input, ...]
    arguments: tuple[int, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    records: tuple[str, ...]
    cotangents: tuple[str, ...]
    smooth: bool = False

    def source(self, form: Form) -> str:
        """Return the program as Python source in one form."""
        names = [f"a{i}" for i in range(len(self.arguments))]
        results, drawn = ", ".join(self.outputs), "".join(f"{name}, " for name in self.records)
        returned = f"return ({results},)" + ("" if form is Form.BARE else f", ({drawn})")
        body = [line.of(form) for line in self.lines]
        parameters = ["DRAWS", *names] if form is Form.REPLAYED else names
        text = "\n".join(filter(None, (*body, returned)))
        return f"{PRELUDE}\n\ndef program({', '.join(parameters)}):\n{indent(text, '    ')}\n"

    def function(self, form: Form) -> Callable[..., Any]:
        """Return the program as a function, with its source where tracebacks and compilers look for it."""
        source, name = self.source(form), f"program_{next(NUMBER)}.py"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        found: dict[str, Any] = {"__name__": "fuzz"}
        exec(compile(source, name, "exec"), found)
        return found["program"]

    def leaves(self, seed: int) -> list[torch.Tensor]:
        """Return new tensors, the same for the same seed."""
        return [input_.leaf(1000 * seed + i) for i, input_ in enumerate(self.inputs)]

    def called_with(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the arguments made of some leaves."""
        made = [input_.argument(leaf) for input_, leaf in zip(self.inputs, leaves, strict=True)]
        return [made[i] for i in self.arguments]

    def script(self, frontend: str, executor: str) -> str:
        """Return a script that runs the program compiled and, where that says something, eagerly."""
        made = [f"i{i} = {text}" for i, text in enumerate(map(str, self.inputs))]
        given = ", ".join(f"i{i} * 1" if self.inputs[i].history else f"i{i}" for i in self.arguments)
        form = Form.BARE if self.smooth else Form.RECORDED
        options = f'{{"executors": ({executor!r},)}}'
        start = {"thunder": f"thunder.jit(program, delay_trace_split=True, jointtrace={options})",
                 "dynamo": f'torch.compile(program, backend="jointtrace", options={options})'}[frontend]
        outputs = "results" if self.smooth else "results[0]"
        picked = [i for i, kind in enumerate(self.cotangents) if kind]
        return "\n".join([
            "import jointtrace, thunder", self.source(form), "", "for step in (program, " + start + "):",
            "    torch.manual_seed(0)", *(f"    {line}" for line in made), f"    results = step({given})",
            f"    sum({outputs}[k].sum() for k in {picked}).backward()",
            f"    print(results, *[i.grad for i in ({', '.join(f'i{i}' for i in range(len(made)))},)])", ""])
