"""Hypothesis builds random torch programs that eager PyTorch runs.

Each statement is run as it is added, so that the next one knows shapes and dtypes; one that raises, or whose results
are too large to compare, is dropped again.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Any

import torch
from conformance.fuzz import statements
from conformance.fuzz.program import PRELUDE, Form, Input, Line, Program
from hypothesis import strategies as st

SHAPES = ((2, 3), (3, 3), (3,), (3, 2), (2, 1, 3), (), (1,))
LARGE = 50.0
CHECKPOINT = "checkpoint"


@st.composite
def programs(draw: st.DrawFn, max_lines: int = 10) -> Program:
    """Generate a program and what it is called with."""
    smooth = draw(st.integers(0, 4)) == 4
    inputs = draw(st.lists(_inputs(smooth), min_size=1, max_size=3))
    if not any(i.requires_grad for i in inputs):
        inputs[0] = Input(inputs[0].shape)
    arguments = [*range(len(inputs))]
    if draw(st.integers(0, 5)) == 5:
        arguments.append(draw(st.sampled_from(arguments)))
    build = Builder(draw, smooth)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build.add_arguments(inputs, arguments)
        for _ in range(draw(st.integers(1, max_lines))):
            build.add()
        outputs = build.choose_outputs()
    kinds = draw(st.lists(st.sampled_from(("plain", "plain", "expanded", "")), min_size=len(outputs),
                          max_size=len(outputs)))
    return Program(tuple(inputs), tuple(arguments), tuple(build.lines), outputs, tuple(build.records),
                   build.cotangents(outputs, kinds), smooth)


def _inputs(smooth: bool) -> st.SearchStrategy[Input]:
    dtypes = (torch.float64,) if smooth else (torch.float64,) * 4 + (torch.float32, torch.int64)

    def fitting(shape: tuple[int, ...], dtype: torch.dtype, grad: bool, layout: str, history: bool) -> Input:
        grad = grad and dtype.is_floating_point
        return Input(shape, dtype, grad, layout, history and grad)

    layouts = st.sampled_from(("contiguous",) * 4 + ("transposed", "strided"))
    grads = st.sampled_from((True, True, True, False))
    return st.builds(fitting, st.sampled_from(SHAPES), st.sampled_from(dtypes), grads, layouts,
                     st.sampled_from((False,) * 5 + (True,)))


class Builder:
    """A program, or the function under a checkpoint, in the making."""

    def __init__(self, draw: st.DrawFn, smooth: bool, depth: int = 0, numbers: list[int] | None = None) -> None:
        self.draw = draw
        self.smooth = smooth
        self.depth = depth
        self.numbers = [0, 0] if numbers is None else numbers  # of values, and of draws
        self.env: dict[str, Any] = {}
        self.names: list[str] = []  # readable values
        self.fixed: set[str] = set()  # what must not be written to
        self.lines: list[Line] = []
        self.records: list[str] = []
        self.space: dict[str, Any] = {}
        exec(PRELUDE, self.space)

    # what statements ask for

    def choose(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(tuple(options)))

    def pick(self, wanted: Callable[[torch.Tensor], bool]) -> str | None:
        """Choose a value, newest first as hypothesis shrinks."""
        fitting = [name for name in reversed(self.names) if wanted(self.env[name])]
        return self.draw(st.sampled_from(fitting)) if fitting else None

    def pick_target(self) -> str | None:
        """Choose a value to write to."""
        memory = {self.env[name].untyped_storage().data_ptr() for name in self.fixed}
        fitting = [name for name in reversed(self.names) if statements.is_float(self.env[name])
                   and self.env[name].untyped_storage().data_ptr() not in memory]
        return self.draw(st.sampled_from(fitting)) if fitting else None

    def fresh(self) -> str:
        self.numbers[0] += 1
        return f"v{self.numbers[0]}"

    def assign(self, form: str, **operands: Any) -> Line | None:
        """Return `fresh = form`."""
        if any(operand is None for operand in operands.values()):
            return None
        self.made = [self.fresh()]
        return Line(f"{self.made[0]} = {form.format(**operands)}")

    def assign_several(self, form: str, **operands: Any) -> Line | None:
        """Return the unpacking of several results."""
        if any(operand is None for operand in operands.values()):
            return None
        try:
            count = len(eval(form.format(**operands), self.space, self.env))
        except (RuntimeError, IndexError):
            return None
        self.made = [self.fresh() for _ in range(count)]
        return Line(f"{', '.join(self.made)}{',' * (count == 1)} = {form.format(**operands)}")

    def write(self, form: str, **operands: Any) -> Line:
        """Return a write in place."""
        self.made = []
        return Line(form.format(**operands))

    def drawn(self, form: str, replayed: str, record: str, **operands: Any) -> Line | None:
        """Return a draw; the record of what was drawn is one more value."""
        if any(operand is None for operand in operands.values()):
            return None
        value, kept, number = self.fresh(), f"k{self.numbers[1]}", self.numbers[1]
        self.numbers[1] += 1
        self.made = [value]
        self.kept = [kept]
        note = f"{kept} = {record.format(v=value)}"
        text = f"{value} = {form.format(**operands)}"
        return Line(f"{text}\n{note}", f"{value} = {replayed.format(k=number, **operands)}\n{note}", text)

    # building

    def add_arguments(self, inputs: Sequence[Input], arguments: Sequence[int]) -> None:
        """Take the arguments in; one that stands in two places must not be written to."""
        leaves = [input_.leaf(i) for i, input_ in enumerate(inputs)]
        for place, i in enumerate(arguments):
            name = f"a{place}"
            self.env[name] = inputs[i].argument(leaves[i])
            self.names.append(name)
            if arguments.count(i) > 1:
                self.fixed.add(name)

    def add(self) -> None:
        """Add one statement, if the one chosen fits."""
        self.made, self.kept = [], []
        makers = (*statements.ALWAYS, *((checkpointed,) * 3 if self.depth < 2 else ()))
        line = self.draw(st.sampled_from(makers))(self)
        if line is not None and self.runs(line):
            self.lines.append(line)
            self.names += self.made
            self.records += self.kept

    def runs(self, line: Line) -> bool:
        """Run a statement; whether what it makes can be used."""
        try:
            exec(line.text, self.space, self.env)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        values = [self.env[name] for name in self.made]
        if any(value.numel() > 64 or value.numel() == 0 for value in values):
            return False
        return all(not v.is_floating_point() or bool((v.abs() < LARGE).all()) for v in values)

    def choose_outputs(self) -> tuple[str, ...]:
        """Choose what is returned; the newest value that has a gradient is always among it."""
        newest = next((n for n in reversed(self.names) if self.env[n].requires_grad), self.names[-1])
        others = self.draw(st.lists(st.sampled_from(self.names[::-1]), max_size=3))
        return newest, *others

    def cotangents(self, outputs: Sequence[str], kinds: Sequence[str]) -> tuple[str, ...]:
        """Return which outputs get a cotangent: one at least."""
        found = [kind if self.env[n].requires_grad else "" for n, kind in zip(outputs, kinds, strict=True)]
        if not any(found):
            found[0] = "plain" if self.env[outputs[0]].requires_grad else ""
        return tuple(found)


def checkpointed(b: Builder) -> Line | None:
    """A function of some values under a checkpoint: it writes to nothing that it was not the one to make."""
    given = [b.pick(statements.is_float) for _ in range(b.draw(st.integers(1, 2)))]
    if None in given:
        return None
    inner = Builder(b.draw, b.smooth, b.depth + 1, b.numbers)
    parameters = [f"p{b.depth}{i}" for i in range(len(given))]
    for name, outer in zip(parameters, given, strict=True):
        inner.env[name] = b.env[outer]
        inner.names.append(name)
        inner.fixed.add(name)
    for _ in range(b.draw(st.integers(1, 4))):
        inner.add()
    made = [name for name in inner.names if name not in parameters and b_float(inner, name)]
    if not made:
        return None
    results = list(dict.fromkeys(b.draw(st.lists(st.sampled_from(made[::-1]), min_size=1, max_size=2))))
    b.made, b.kept = [b.fresh() for _ in results], list(inner.records)
    function = f"inner{b.numbers[0]}"
    texts = [_checkpoint_text(form, function, inner, parameters, given, results, b.made) for form in
             (Form.RECORDED, Form.REPLAYED, Form.BARE)]
    return Line(*texts)


def b_float(builder: Builder, name: str) -> bool:
    return statements.is_float(builder.env[name])


def _checkpoint_text(
    form: Form, function: str, inner: Builder, parameters: Sequence[str], given: Sequence[str], results: Sequence[str],
    made: Sequence[str],
) -> str:
    records = [] if form is Form.BARE else inner.records
    body = "\n".join([*(line.of(form) for line in inner.lines), f"return {', '.join([*results, *records])},"])
    return (f"def {function}({', '.join(parameters)}):\n{indent(body, '    ')}\n"
            f"{', '.join([*made, *records])}, = checkpoint({function}, {', '.join(given)}, use_reentrant=False)")
