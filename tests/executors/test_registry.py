from __future__ import annotations

import textwrap
import warnings
from pathlib import Path

import pytest
import torch

from jointtrace.errors import OptionError, UnsupportedError
from jointtrace.executors.base import Executor
from jointtrace.executors.registry import all_executors, resolve


def names(executors):
    return [executor.name for executor in executors]


def test_the_built_in_executors_are_there():
    known = all_executors()
    assert {"torch_compile", "nvfuser", "eager"} <= set(known)
    for name, executor in known.items():
        assert isinstance(executor, Executor)
        assert executor.name == name


def test_looking_them_up_warns_of_nothing():
    all_executors.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_executors()


def test_names_are_resolved_in_their_order():
    assert names(resolve(("eager",))) == ["eager"]
    assert resolve(()) == ()


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match=r"'fast'; known: torch_compile, nvfuser, eager"):
        resolve(("eager", "fast"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="nvFuser may be there")
def test_an_unavailable_executor_is_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match=r"'nvfuser' is unavailable: nvFuser needs a CUDA device"):
        resolve(("nvfuser",))


@pytest.mark.skipif(all_executors()["torch_compile"].unavailable() is not None, reason="no C++ compiler")
def test_torch_compile_is_the_default():
    assert names(resolve(None)) == ["torch_compile"]


def test_without_a_compiler_the_default_is_eager_with_one_warning(python):
    done = python("""
import os, warnings
os.environ["CXX"] = "/nowhere/g++"
os.environ["PATH"] = "/nowhere"
from jointtrace.executors.registry import resolve
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print([e.name for e in resolve(None)], [e.name for e in resolve(None)])
print([str(w.message) for w in caught if "running eagerly" in str(w.message)])
""")
    first, second = done.stdout.splitlines()
    assert first == "['eager'] ['eager']"
    assert second.count("running eagerly") == 1
    assert "install one" in second


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package on the path that offers executors under the names given."""

    def offer(*entries: str) -> None:
        info = tmp_path / "offering-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[jointtrace.executors]\n" + "\n".join(entries))
        (tmp_path / "offering.py").write_text(textwrap.dedent("""
            from jointtrace.executors.eager import EagerExecutor

            class Mine(EagerExecutor):
                name = "mine"

            instance = Mine()
            something = 3
        """))
        monkeypatch.syspath_prepend(tmp_path)
        all_executors.cache_clear()

    yield offer
    monkeypatch.undo()
    all_executors.cache_clear()


@pytest.mark.parametrize("what", ["Mine", "instance"])
def test_another_package_can_offer_an_executor(offered, what):
    offered(f"mine = offering:{what}")
    assert names(resolve(("mine", "eager"))) == ["mine", "eager"]


def test_a_built_in_name_cannot_be_taken(offered):
    offered("eager = offering:Mine")
    with pytest.warns(UserWarning, match=r"'eager' of offering:Mine ignored"):
        known = all_executors()
    assert type(known["eager"]).__name__ == "EagerExecutor"


@pytest.mark.parametrize(("what", "reason"), [
    ("missing", "failed to load: AttributeError"), ("something", "is not an executor called"),
    ("instance", "is not an executor called 'other'"),
])
def test_an_offer_that_is_no_executor_is_listed_with_the_reason(offered, what, reason):
    offered(f"other = offering:{what}")
    assert "eager" in all_executors()
    with pytest.raises(UnsupportedError, match=reason):
        resolve(("other",))
