"""versions: which torch and lightning-thunder we work with, read from their metadata (nothing is imported)."""
from __future__ import annotations

from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

TORCH = SpecifierSet(">=2.10,<2.15")
THUNDER = SpecifierSet("==0.2.6")
TESTED_TORCH = ("2.13.0", "2.14.1")
_SUPPORTED = {"torch": TORCH, "lightning-thunder": THUNDER}


def installed(package: str) -> str:
    """Return the installed version of `package`.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"jointtrace needs {package}{_SUPPORTED[package]}, but it is not installed") from None


def contains(accepted: SpecifierSet, version: str) -> bool:
    """Say whether `version` lies in `accepted`; nightly and local builds count as the release they lead to."""
    return accepted.contains(Version(version).base_version)


def same_release(version: str, release: str) -> bool:
    """Say whether `version` is a build of `release` (2.13.0+cpu is one of 2.13.0)."""
    return Version(version).base_version == release


def torch_in(accepted: str) -> bool:
    """Say whether the installed torch lies in a range such as `>=2.13`."""
    return contains(SpecifierSet(accepted), installed("torch"))


def check_supported() -> None:
    """Raise one clear line unless the installed torch and lightning-thunder are ones we work with.

    Raises:
        ImportError: a version outside the range, or a missing package.
    """
    for package, accepted in _SUPPORTED.items():
        version = installed(package)
        if not contains(accepted, version):
            raise ImportError(f"jointtrace works with {package}{accepted}, but {package} {version} is installed")
