"""versions: one clear line for a torch or thunder we do not work with."""
from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from jointtrace.compat import versions
from jointtrace.compat.breaks import BREAKS


@pytest.mark.parametrize(
    ("package", "version"),
    [("torch", "2.9.1"), ("torch", "2.15.0"), ("torch", "2.15.0a0+git12345"), ("lightning-thunder", "0.2.7")],
)
def test_a_version_outside_the_range_is_one_import_error_line(tmp_path, package, version):
    folder = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import jointtrace"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *_, line = failed.stderr.strip().splitlines()
    accepted = {"torch": versions.TORCH, "lightning-thunder": versions.THUNDER}[package]
    assert line == f"ImportError: jointtrace works with {package}{accepted}, but {package} {version} is installed"


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.14.1", "2.10.0a0+git12345"])
def test_a_version_inside_the_range_is_accepted(version):
    assert versions.contains(versions.TORCH, version)


def test_a_missing_package_is_named(monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"jointtrace needs lightning-thunder==0\.2\.6, but it is not installed"):
        versions.installed("lightning-thunder")


def test_the_tested_versions_are_supported():
    assert all(versions.contains(versions.TORCH, version) for version in versions.TESTED_TORCH)


def test_every_break_holds_for_some_supported_torch():
    releases = [f"2.{minor}.0" for minor in range(10, 15)]
    for found in BREAKS:
        assert any(versions.contains(versions.SpecifierSet(found.torch), release) for release in releases), found.what
