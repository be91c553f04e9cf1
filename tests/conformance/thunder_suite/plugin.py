"""plugin: a pytest plugin that runs thunder's own tests with or without jointtrace's option, and notes each outcome.

`pytest -p plugin --outcomes FILE [--delay-trace-split]`. Both runs import jointtrace, whose repairs let thunder run on
current torch, draw from the same seeds, and send thunder's gradient tests through the joint trace.
"""
from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from compare import read_lines
from torch.utils._pytree import tree_leaves

import jointtrace  # noqa: F401  before thunder, which it repairs

import thunder  # isort: skip
from thunder.core import transforms  # isort: skip

import jointtrace.frontends.thunder_jit as front_end  # isort: skip

OPTION = "delay_trace_split"
JIT = thunder.jit
LEGACY_GRAD = transforms.grad
GRADIENT_TESTS = ("thunder.tests.test_grad",)  # elsewhere the legacy `grad` is what is tested
compilations: list[int] = [0]  # by jointtrace, so far


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file of JSON lines; tests that stand in it are not run again")
    parser.addoption("--delay-trace-split", action="store_true", help="switch jointtrace on in every thunder.jit")
    parser.addoption("--jointtrace-executor", default="eager", help="who runs the regions")


def pytest_configure(config: pytest.Config) -> None:
    """Switch before any test module is imported; count what jointtrace compiles."""
    if config.getoption("--delay-trace-split"):
        thunder.jit = switched(JIT, config.getoption("--jointtrace-executor"))
    front_end.add_record = _counted(front_end.add_record)
    if config.getoption("--outcomes"):
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


def switched(jit: Callable[..., Any], executor: str) -> Callable[..., Any]:
    """Return `jit` with the option on wherever its caller did not set it.

    `thunder.compile`, `thunder.grad`, `thunderfx` and `add_transform` look `thunder.jit` up when they are called.
    """

    @functools.wraps(jit)
    def switched_jit(fn: Any, /, **options: Any) -> Any:
        if OPTION not in options:
            options = {**options, OPTION: True, "jointtrace": {"executors": (executor,)}}
        return jit(fn, **options)

    return switched_jit


def _counted(add_record: Callable[..., None]) -> Callable[..., None]:
    def add(*args: Any) -> None:
        compilations[0] += 1
        add_record(*args)

    return add


def joint_grad(compiled: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    """Do what thunder's legacy `grad` does by way of autograd: gradients of all outputs with respect to all inputs.

    The legacy one traces a separate gradient program that no compiled training step uses.
    """

    def gradients(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        outputs = [out for out in tree_leaves(compiled(*args, **kwargs)) if _has_gradient(out)]
        inputs = tree_leaves((args, kwargs))
        if isinstance(compiled, thunder.ThunderModule):
            _, inputs, _ = thunder.compile_data(compiled).get_computation_and_inputs(*args, **kwargs)
        inputs = [given for given in inputs if _has_gradient(given)]
        found = torch.autograd.grad(outputs, inputs, [torch.ones_like(out) for out in outputs], allow_unused=True)
        first = {id(given): position for position, given in reversed(list(enumerate(inputs)))}
        return [grad if first[id(given)] == position else torch.zeros_like(grad)  # of a tied parameter, added up later
                for position, (given, grad) in enumerate(zip(inputs, found, strict=True)) if grad is not None]

    return gradients


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def pytest_collection_finish(session: pytest.Session) -> None:
    for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
        if module.__name__ in GRADIENT_TESTS and getattr(module, "grad", None) is LEGACY_GRAD:
            module.grad = joint_grad


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


class Outcomes:
    """Writes a line as each test starts and ends; a test that kills the process stays "crashed"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known = {line["test"] for line in read_lines(path)}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what has run."""
        done = [item for item in items if item.nodeid in self.known]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self.known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.compiled, self.outcome = compilations[0], {"test": item.nodeid, "outcome": "crashed"}
        self.write(self.outcome)
        done = yield
        self.write({**self.outcome, "compiled": compilations[0] - self.compiled})
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
        message = "" if report.passed else report.longreprtext.strip()[-2000:]
        self.outcome = {"test": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 1),
                        "message": message}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.write({"test": report.nodeid, "outcome": f"collection {report.outcome}",
                        "message": report.longreprtext.strip()[-2000:]})

    def write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
