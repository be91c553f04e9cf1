"""patching: all or nothing, idempotent, and put back."""
from __future__ import annotations

import sys
import types

import pytest

from jointtrace.compat.patching import Patch, apply_patches, is_applied, remove_patches


@pytest.fixture
def toy(monkeypatch):
    """A module to patch."""
    module = types.ModuleType("toy")
    module.first, module.second, module.table = 1, 2, {"key": 3}

    class Base:
        value = 4

    module.Child = type("Child", (Base,), {})
    monkeypatch.setitem(sys.modules, "toy", module)
    return module


def _plus_ten(value):
    return value + 10


def _fails(value):
    raise AttributeError("no such thing")


FIRST = Patch("toy", "first", _plus_ten)
SECOND = Patch("toy", "second", _plus_ten)
MISSING = Patch("toy", "third", _plus_ten)


def test_patches_apply_and_come_off(toy):
    apply_patches([FIRST, SECOND])
    assert (toy.first, toy.second) == (11, 12)
    assert is_applied(FIRST)
    remove_patches([FIRST, SECOND])
    assert (toy.first, toy.second) == (1, 2)
    assert not is_applied(FIRST)


def test_nothing_is_patched_when_one_attribute_is_missing(toy):
    with pytest.raises(ImportError, match=r"toy\.third.*expected in lightning-thunder==0\.2\.6 on torch.*nothing was"):
        apply_patches([FIRST, MISSING, SECOND])
    assert (toy.first, toy.second) == (1, 2)
    assert not is_applied(FIRST)


def test_nothing_is_patched_when_one_replacement_cannot_be_made(toy):
    with pytest.raises(AttributeError, match="no such thing"):
        apply_patches([FIRST, Patch("toy", "second", _fails)])
    assert toy.first == 1


def test_nothing_is_patched_when_one_owner_refuses(toy):
    toy.frozen = types.MappingProxyType({"key": 3})
    refusing = Patch("toy", "frozen", _plus_ten, item=lambda: "key")
    with pytest.raises(TypeError):
        apply_patches([FIRST, refusing])
    assert toy.first == 1
    assert not is_applied(FIRST)


def test_a_missing_module_is_named():
    with pytest.raises(ImportError, match=r"no_such_module\.name"):
        apply_patches([Patch("no_such_module", "name", _plus_ten)])


def test_applying_twice_patches_once(toy):
    apply_patches([FIRST])
    apply_patches([FIRST, FIRST])
    assert toy.first == 11
    remove_patches([FIRST])
    assert toy.first == 1


def test_a_patch_named_twice_in_one_list_applies_once(toy):
    apply_patches([FIRST, FIRST])
    assert toy.first == 11
    remove_patches([FIRST])
    assert toy.first == 1


def test_two_patches_of_one_attribute_stack(toy):
    double = Patch("toy", "first", lambda value: value * 2)
    apply_patches([FIRST, double])
    assert toy.first == 22
    remove_patches([FIRST, double])
    assert toy.first == 1


def test_a_patch_is_not_removed_from_under_another(toy):
    double = Patch("toy", "first", lambda value: value * 2)
    apply_patches([FIRST, double])
    with pytest.raises(RuntimeError, match="replaced again"):
        remove_patches([FIRST])
    remove_patches([FIRST, double])


def test_an_entry_of_a_dict_is_patched(toy):
    entry = Patch("toy", "table", _plus_ten, item=lambda: "key")
    apply_patches([entry])
    assert toy.table == {"key": 13}
    remove_patches([entry])
    assert toy.table == {"key": 3}


def test_an_inherited_attribute_is_inherited_again_after_removal(toy):
    inherited = Patch("toy.Child", "value", _plus_ten)
    apply_patches([inherited])
    assert toy.Child.value == 14
    remove_patches([inherited])
    assert toy.Child.value == 4
    assert "value" not in vars(toy.Child)


def test_a_module_imported_anew_is_patched_anew(toy, monkeypatch):
    apply_patches([FIRST])
    again = types.ModuleType("toy")
    again.first = 5
    monkeypatch.setitem(sys.modules, "toy", again)
    apply_patches([FIRST])
    assert again.first == 15
    remove_patches([FIRST])
    assert again.first == 5


def test_removal_follows_the_order_on_a_module_imported_anew(toy, monkeypatch):
    double = Patch("toy", "first", lambda value: value * 2)
    apply_patches([FIRST, double])
    again = types.ModuleType("toy")
    again.first = 5
    monkeypatch.setitem(sys.modules, "toy", again)
    apply_patches([double])
    apply_patches([FIRST])
    assert again.first == 20
    remove_patches([FIRST, double])
    assert again.first == 5
