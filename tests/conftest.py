"""Set-up shared by all tests."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers side by side: a loop on two threads waits for both cores

import pytest
import torch

import jointtrace  # noqa: F401  lets every test import thunder


@pytest.fixture(autouse=True)
def _same_seed_for_each_test() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    yield
    assert torch.is_grad_enabled()
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a fresh interpreter; return what it printed."""

    def run(code: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a CUDA device where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
