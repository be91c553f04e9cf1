"""Run one generated program compiled and in eager PyTorch, and tell how it went.

A program is called twice, the second time with other numbers, so that what was compiled for the first call is used
again. What it draws is handed to the eager run. A `smooth` program tells nobody what it draws; from one seed it is a
function, and the differences of its results say what its gradient is.
"""
from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import thunder
import torch
from conformance.fuzz.program import Form, Program

import jointtrace
from jointtrace.errors import UnsupportedError

FRONTENDS = ("thunder", "dynamo")
CALLS = 2
STEP = 1e-6
# of the largest number in a tensor; in float64 only the order of sums differs
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}


class Wrong(AssertionError):
    """A compiled program does something else than eager PyTorch."""


@dataclass(frozen=True)
class Verdict:
    """How a program went: "right", "refused" (with the message), or "invalid": eager does not run it."""

    kind: str
    why: str = ""


def compiled(program: Program, frontend: str, executor: str = "eager") -> Callable[..., Any]:
    """Compile a program."""
    fn = program.function(Form.BARE if program.smooth else Form.RECORDED)
    options = {"executors": (executor,)}
    if frontend == "thunder":
        return thunder.jit(fn, delay_trace_split=True, jointtrace=options)
    torch._dynamo.reset()
    return torch.compile(fn, backend="jointtrace", options=options, fullgraph=True)


def judge(program: Program, frontend: str, executor: str = "eager") -> Verdict:
    """Compare a program with eager PyTorch.

    Raises:
        Wrong: it differs, or an error comes out that is no `UnsupportedError`.
    """
    if not _runs_eagerly(program):
        return Verdict("invalid")
    step = compiled(program, frontend, executor)
    check = _check_differences if program.smooth else _check_against_eager
    for seed in range(CALLS):
        try:
            check(program, step, seed)
        except Wrong:
            raise
        except Exception as error:
            refused = _refusal(error)
            if refused is None:
                raise Wrong("".join(traceback.format_exception(error))[-3000:]) from error
            return Verdict("refused", refused)
    return Verdict("right")


def _refusal(error: BaseException | None) -> str | None:
    """Return the message of the UnsupportedError that an error is, or is made of, or of a refusal of Dynamo."""
    while error is not None:
        if isinstance(error, UnsupportedError):
            return str(error)
        if isinstance(error, torch._dynamo.exc.Unsupported):
            return f"Dynamo: {error}"
        if isinstance(error, torch._dynamo.exc.BackendCompilerFailed) and "modified by an inplace" in str(error):
            return "AOTAutograd: modified by an inplace operation"  # in a checkpoint, where eager computes it again
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None


@dataclass(frozen=True)
class Outcome:
    """What a call leaves behind, by name."""

    values: dict[str, Any]
    facts: dict[str, Any]


def outcome(program: Program, call: Callable[[list[Any]], Sequence[Any]], seed: int) -> Outcome:
    """Call a program, differentiate its results, and note everything a user can see."""
    leaves = program.leaves(seed)
    given = program.called_with(leaves)
    results = call(given)
    named = [(f"output {name}", out) for name, out in zip(program.outputs, results, strict=True)]
    values: dict[str, Any] = {name: out.detach().clone() for name, out in named}
    facts: dict[str, Any] = {name: (out.requires_grad, out.dtype) for name, out in named}
    pairs = [(out, cotangent(out, kind, seed, i))
             for i, (out, kind) in enumerate(zip(results, program.cotangents, strict=True)) if kind]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    for i, leaf in enumerate(leaves):
        facts[f"gradient of input {i}"] = None if leaf.grad is None else leaf.grad.dtype
        if leaf.grad is not None:
            values[f"gradient of input {i}"] = leaf.grad
    values.update((f"argument {i} after the call", arg.detach()) for i, arg in enumerate(given))
    facts.update((f"argument {i} after the call", arg.requires_grad) for i, arg in enumerate(given))
    return Outcome(values, facts)


def cotangent(out: torch.Tensor, kind: str, seed: int, position: int) -> torch.Tensor:
    """Return a cotangent for an output."""
    if kind == "expanded":
        return torch.ones((), dtype=out.dtype).expand(out.shape)
    generator = torch.Generator().manual_seed(100 * seed + position)
    return torch.randn(out.shape, dtype=out.dtype, generator=generator)


def _runs_eagerly(program: Program) -> bool:
    fn = program.function(Form.BARE)
    try:
        for seed in range(CALLS):
            outcome(program, lambda given: fn(*given), seed)
    except (RuntimeError, IndexError, ValueError):  # as "modified by an inplace operation": eager refuses it
        return False
    return True


# programs that are compared with eager

def _check_against_eager(program: Program, step: Callable[..., Any], seed: int) -> None:
    draws: list[Any] = []

    def call(given: list[Any]) -> Sequence[Any]:
        torch.manual_seed(seed)
        results, drawn = step(*given)
        draws.extend(d.detach().clone() for d in drawn)
        return results

    found = outcome(program, call, seed)
    replay = program.function(Form.REPLAYED)
    order = [int(name[1:]) for name in program.records]
    numbers = dict(zip(order, draws, strict=True))
    expected = outcome(program, lambda given: replay(numbers, *given)[0], seed)
    if found.facts != expected.facts:
        raise Wrong("\n".join(f"{name}: {found.facts.get(name)}, in eager {fact}"
                              for name, fact in expected.facts.items() if found.facts.get(name) != fact))
    single = any(i.dtype == torch.float32 for i in program.inputs) or "float" in program.source(Form.RECORDED)
    close = CLOSE[torch.float32 if single else torch.float64]
    for name, value in expected.values.items():
        _assert_close(name, found.values[name], value, close)


def _assert_close(name: str, found: torch.Tensor, expected: torch.Tensor, close: float) -> None:
    if found.shape != expected.shape:
        raise Wrong(f"{name}: shape {tuple(found.shape)}, in eager {tuple(expected.shape)}")
    size = max(1.0, float(expected.double().abs().nan_to_num(posinf=0.0).max())) if expected.numel() else 1.0
    if not torch.allclose(found.double(), expected.double(), rtol=0.0, atol=close * size, equal_nan=True):
        raise Wrong(f"{name}:\n{found}\nin eager:\n{expected}")


# programs that are compared with differences of their own results

def _check_differences(program: Program, step: Callable[..., Any], seed: int) -> None:
    leaves = program.leaves(seed)
    found = _loss(program, step, leaves, seed)
    if not found.requires_grad:
        return
    moving = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(found, moving, allow_unused=True)
    misses = []
    for attempt in range(3):  # a kink of the function may lie between two points, but not each time
        generator = torch.Generator().manual_seed(attempt)
        ways = [torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator) for leaf in moving]
        parts = [(g * w).sum() for g, w in zip(grads, ways, strict=True) if g is not None]
        slope = float(sum(parts))
        ends = [float(_loss(program, step, _moved(leaves, ways, sign * STEP), seed)) for sign in (1, -1)]
        measured = (ends[0] - ends[1]) / (2 * STEP)
        if abs(slope - measured) <= 1e-4 * (1 + sum(abs(float(p)) for p in parts)):
            return
        misses.append(f"by its gradient {slope}, by differences of its results {measured}")
    raise Wrong("the slope of the program along a line: " + "; ".join(misses))


def _moved(leaves: Sequence[torch.Tensor], ways: Sequence[torch.Tensor], by: float) -> list[torch.Tensor]:
    remaining = iter(ways)
    return [(leaf.detach() + by * next(remaining)).requires_grad_() if leaf.requires_grad else leaf.clone()
            for leaf in leaves]


def _loss(program: Program, step: Callable[..., Any], leaves: Sequence[torch.Tensor], seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    given = program.called_with([leaf if leaf.requires_grad else leaf.clone() for leaf in leaves])
    results = step(*given)
    pairs = zip(results, program.cotangents, strict=True)
    parts = [(out * cotangent(out, kind, seed, i)).sum() for i, (out, kind) in enumerate(pairs) if kind]
    return sum(parts, torch.zeros((), dtype=torch.float64))


def version() -> str:
    """Return what was tested."""
    return f"torch {torch.__version__}, jointtrace at {jointtrace.__file__}"
