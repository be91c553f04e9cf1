"""Judge one operator, dtype and front end: run its samples, and where they do not pass, see who is at fault."""
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import thunder
import torch
from conformance.ops.compare import DiffersError, assert_gradient_of_a_draw, assert_same, is_random, run
from conformance.ops.samples import DTYPES, Sample, differentiable, samples, tolerances
from torch.testing._internal.opinfo.core import OpInfo

from jointtrace.errors import UnsupportedError

Fn = Callable[..., Any]


class Verdict(str, Enum):
    """What came of a sample, or of all samples of an operator: the last of this list that any of them has."""

    PASS = "pass"
    HOST_REFUSES = "host refuses"  # torch.compile (aot_eager), or thunder alone, raises as well
    REFUSED = "refused"  # a clear UnsupportedError
    HOST_WRONG = "host wrong"  # differs from eager, and so does torch.compile (aot_eager)
    CRASH = "crash"  # any other exception, or no answer
    WRONG = "wrong"


ORDER = list(Verdict)


@dataclass(frozen=True)
class Front:
    """A front end with an executor, and the compiler it stands on."""

    name: str
    compile: Callable[[Fn], Fn]
    host: Callable[[Fn], Fn]
    host_may_be_wrong: bool


def _thunder(executor: str) -> Callable[[Fn], Fn]:
    return lambda fn: thunder.jit(fn, delay_trace_split=True, jointtrace={"executors": (executor,)})


def _dynamo(executor: str) -> Callable[[Fn], Fn]:
    options = {"executors": (executor,)}
    return lambda fn: torch.compile(fn, backend="jointtrace", fullgraph=True, options=options)


def _aot_eager(fn: Fn) -> Fn:
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


FRONTS = {
    front.name: front
    for front in (
        Front("thunder", _thunder("eager"), thunder.jit, False),
        Front("torch.compile", _dynamo("eager"), _aot_eager, True),
        Front("thunder, torch_compile", _thunder("torch_compile"), thunder.jit, False),
        Front("torch.compile, torch_compile", _dynamo("torch_compile"), _aot_eager, True),
    )
}


@dataclass(frozen=True)
class Judgement:
    """The verdict on an operator with a dtype and a front end.

    Attributes:
        op, dtype, front: what was judged.
        verdict: the worst of its samples.
        passed: how many of `samples` pass.
        reason: the first reason given for that verdict.
    """

    op: str
    dtype: str
    front: str
    verdict: Verdict
    passed: int
    samples: int
    reason: str

    def row(self) -> dict[str, Any]:
        """Return the judgement as plain data."""
        return asdict(self) | {"verdict": self.verdict.value}


def judge(name: str, dtype: str, front: str, count: int) -> Judgement:
    """Judge at most `count` samples of the operator called `name`."""
    op, chosen = differentiable()[name], FRONTS[front]
    results = [judge_sample(op, s, DTYPES[dtype], chosen) for s in samples(op, DTYPES[dtype], count)]
    return summed_up(name, dtype, front, results)


def summed_up(op: str, dtype: str, front: str, results: Iterable[tuple[Verdict, str]]) -> Judgement:
    """Return the judgement that follows from those of the samples."""
    results = list(results)
    worst = max((verdict for verdict, _ in results), key=ORDER.index, default=Verdict.PASS)
    reason = next((why for verdict, why in results if verdict is worst), "no sample")
    passed = sum(verdict is Verdict.PASS for verdict, _ in results)
    return Judgement(op, dtype, front, worst, passed, len(results), reason)


def judge_sample(op: OpInfo, sample: Sample, dtype: torch.dtype, front: Front) -> tuple[Verdict, str]:
    """Judge one sample; a second opinion comes from the compiler that the front end stands on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict, reason = _verdict(op, sample, dtype, front.compile)
        if verdict in (Verdict.PASS, Verdict.REFUSED):
            return verdict, reason
        host, _ = _verdict(op, sample, dtype, front.host)
    if verdict is Verdict.CRASH and host in (Verdict.CRASH, Verdict.REFUSED):
        return Verdict.HOST_REFUSES, reason
    if verdict is Verdict.WRONG and host is Verdict.WRONG and front.host_may_be_wrong:
        return Verdict.HOST_WRONG, reason
    return verdict, reason


def _verdict(op: OpInfo, sample: Sample, dtype: torch.dtype, compile_fn: Callable[[Fn], Fn]) -> tuple[Verdict, str]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return op.op(*args, **kwargs)

    rtol, atol = tolerances(op, dtype)
    expected = run(call, sample)
    random = is_random(call, sample)
    torch._dynamo.reset()
    try:
        compiled = compile_fn(call)
        found = run(compiled, sample)
        assert_same(found, expected, rtol, atol, values=not random)
        if random and dtype is torch.float64:
            assert_gradient_of_a_draw(compiled, call, sample, found, expected)
    except DiffersError as error:
        return Verdict.WRONG, str(error)
    except Exception as error:  # noqa: BLE001  which one it is makes the verdict
        return (Verdict.REFUSED if _is_clear(error) else Verdict.CRASH), _first_line(error)
    return Verdict.PASS, ""


def _is_clear(error: BaseException | None) -> bool:
    """Whether an error is one of ours that tells a user what cannot be compiled, or was raised from one."""
    while error is not None:
        if isinstance(error, UnsupportedError):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__  # Dynamo's wrapper, or ours
    return False


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:2])}"[:300]
