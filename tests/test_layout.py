"""layout: imports point one way, files and functions stay small, and every folder is packaged."""
from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

ROOT = Path(__file__).parents[1]
LAYERS = (  # a module may import what stands before it, and its own
    "errors",
    "options",
    "compat",
    "ir",
    "joint",
    "passes",
    "regions",
    "runtime",
    "executors",
    "pipeline",
    "checking",
    "reporting",
    "frontends",
    "compiler",
    "demo",
    "doctor",
    "cli",
)
PASS_LINES, FILE_LINES, FUNCTION_LINES = 150, 400, 40
SOURCES = sorted(
    path for folder in ("jointtrace", "executors") for path in (ROOT / folder).rglob("*.py") if path.stat().st_size
)


def _module(path: Path) -> str:
    """Return the dotted name under which `path` is installed."""
    *folders, name = path.relative_to(ROOT).with_suffix("").parts
    folders = ["jointtrace", *folders] if folders[0] == "executors" else folders
    return ".".join(folders if name == "__init__" else [*folders, name])


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk `node` without what stands under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from _run_time_nodes(child)


def _imports(source: str) -> Iterator[str]:
    """Yield the layers of jointtrace that `source` imports when it runs."""
    for node in _run_time_nodes(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "jointtrace":
            names = [f"jointtrace.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        yield from (name.split(".")[1] for name in names if name.startswith("jointtrace."))


def _upward(module: str, source: str) -> list[str]:
    own = module.split(".")[1]
    return [layer for layer in _imports(source) if layer in LAYERS and LAYERS.index(layer) > LAYERS.index(own)]


@pytest.mark.parametrize("path", [path for path in SOURCES if path != ROOT / "jointtrace/__init__.py"], ids=_module)
def test_imports_point_one_way(path):
    module = _module(path)
    assert module.split(".")[1] in LAYERS, "a new layer: give it a place in LAYERS and in the README"
    assert not _upward(module, path.read_text())


def test_an_import_upward_is_seen():
    assert _upward("jointtrace.ir.op", "from jointtrace.passes.cse import cse") == ["passes"]
    assert _upward("jointtrace.ir.op", "def f():\n    import jointtrace.cli") == ["cli"]
    assert _upward("jointtrace.ir.op", "if TYPE_CHECKING:\n    from jointtrace.passes import cse") == []
    assert _upward("jointtrace.passes.cse", "from jointtrace.ir.op import Op") == []


@pytest.mark.parametrize("path", SOURCES, ids=_module)
def test_files_stay_small(path):
    budget = PASS_LINES if path.parent.name == "passes" else FILE_LINES
    assert len(path.read_text().splitlines()) <= budget


@pytest.mark.parametrize("path", SOURCES, ids=_module)
def test_functions_stay_small(path):
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    lines = [(function.name, (function.end_lineno or 0) - function.lineno + 1) for function in functions]
    assert [(name, count) for name, count in lines if count > FUNCTION_LINES] == []


def test_every_folder_with_code_is_packaged():
    listed = set(read_configuration(ROOT / "pyproject.toml", expand=False)["tool"]["setuptools"]["packages"])
    folders = {_module(path.parent / "__init__.py") for path in SOURCES}
    assert listed == folders


def test_the_built_in_executors_are_entry_points_that_load():
    ours = {entry.name: entry for entry in entry_points(group="jointtrace.executors")}
    for name in ("eager", "torch_compile", "nvfuser"):
        assert ours[name].load().name == name


def test_the_executors_folder_installs_inside_the_package():
    import jointtrace.executors

    assert [Path(folder).resolve() for folder in jointtrace.executors.__path__] == [ROOT / "executors"]
