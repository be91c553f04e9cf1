"""doctor: what `jointtrace` finds on this machine, and whether it can work here."""
from __future__ import annotations

import importlib
import os
import platform
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata

from rich.console import Console
from rich.table import Table

from jointtrace.compat import versions
from jointtrace.compat.breaks import BREAKS, Break

_COMPILERS = ("g++", "clang++", "c++")


@dataclass(frozen=True)
class Finding:
    """One line: a subject, its state, and what else there is to know. `fatal`: nothing works until it is mended."""

    subject: str
    state: str
    note: str = ""
    fatal: bool = False


@dataclass(frozen=True)
class Section:
    """Findings under one title."""

    title: str
    findings: tuple[Finding, ...]


def doctor(console: Console) -> int:
    """Print what was found, as tables on a terminal and as plain lines elsewhere; return 0 where jointtrace can run."""
    sections = examine()
    show = _show_table if console.is_terminal else _show_plain
    for section in sections:
        show(console, section)
    fatal = [finding for section in sections for finding in section.findings if finding.fatal]
    verdict = "jointtrace can be used here." if not fatal else f"jointtrace cannot be used here: {fatal[0].subject}."
    console.print(verdict, highlight=False, markup=False)
    return 1 if fatal else 0


def examine() -> tuple[Section, ...]:
    """Import thunder and the executors, and return what was found."""
    imported = _guarded("import thunder", lambda: importlib.import_module("thunder"))
    return (
        Section("Versions", _versions()),
        Section("lightning-thunder on this torch", (*imported, *(_break(found, not imported) for found in BREAKS))),
        Section("Executors", tuple(_executors())),
        Section("Tools", (_compiler(),)),
    )


def _versions() -> tuple[Finding, ...]:
    torch = versions.installed("torch")
    tested = ", ".join(versions.TESTED_TORCH)
    is_tested = any(versions.same_release(torch, release) for release in versions.TESTED_TORCH)
    return (
        Finding("python", platform.python_version()),
        Finding("jointtrace", metadata.version("jointtrace")),
        Finding("torch", torch, "tested" if is_tested else f"untested; tested are {tested}"),
        Finding("lightning-thunder", versions.installed("lightning-thunder"), "tested"),
        Finding("igraph", metadata.version("igraph")),
    )


def _break(found: Break, is_imported: bool) -> Finding:
    where = f"torch{found.torch}"
    if not found.holds:
        return Finding(found.what, "not needed", where)
    return Finding(found.what, "repaired" if is_imported and found.repaired else "not repaired", where)


def _executors() -> Iterable[Finding]:
    from jointtrace.executors.registry import all_executors

    for name, executor in all_executors().items():
        reason = executor.unavailable()
        state = "unavailable" if reason else "available"
        yield Finding(name, state, reason or "", fatal=name == "eager" and reason is not None)


def _compiler() -> Finding:
    chosen = os.environ.get("CXX")
    candidates = (chosen,) if chosen else _COMPILERS
    path = next((path for name in candidates if (path := shutil.which(name))), None)
    if path:
        return Finding("C++ compiler", "found", path)
    return Finding("C++ compiler", "not found", f"looked for {', '.join(candidates)}; torch_compile needs one on a CPU")


def _guarded(subject: str, action: Callable[[], object]) -> tuple[Finding, ...]:
    try:
        action()
    except Exception as error:  # noqa: BLE001  whatever it is, the user is to read it
        return (Finding(subject, "failed", f"{type(error).__name__}: {error}", fatal=True),)
    return ()


def _show_table(console: Console, section: Section) -> None:
    table = Table(title=section.title, title_justify="left", show_header=False)
    for finding in section.findings:
        table.add_row(finding.subject, finding.state, finding.note)
    console.print(table)


def _show_plain(console: Console, section: Section) -> None:
    subject, state = (max(len(getattr(f, part)) for f in section.findings) for part in ("subject", "state"))
    lines = [f"  {f.subject:{subject}}  {f.state:{state}}  {f.note}".rstrip() for f in section.findings]
    console.print("\n".join([section.title, *lines]), highlight=False, markup=False, soft_wrap=True)
