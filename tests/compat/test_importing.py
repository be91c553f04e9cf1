"""importing: any order of `import jointtrace` and `import thunder`, each in a fresh interpreter."""
from __future__ import annotations

import pytest

from jointtrace.compat.versions import torch_in

BREAKS_ALONE = pytest.mark.skipif(not torch_in(">=2.13"), reason="thunder imports by itself on this torch")
WORKS_ALONE = pytest.mark.skipif(torch_in(">=2.13"), reason="thunder needs jointtrace on this torch")
USE = """
import thunder, torch
x = torch.ones(2, requires_grad=True)
thunder.jit(torch.sin)(x).sum().backward()
assert torch.equal(x.grad, torch.cos(x))
from jointtrace.compat.breaks import BREAKS
assert all(found.repaired for found in BREAKS if found.holds)
"""

IMPORT_WITHOUT_US = """
from jointtrace.compat.breaks import BREAKS
import contextlib, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if 'jointtrace' not in type(finder).__module__]
with contextlib.ExitStack() as stubs:
    for found in BREAKS:
        if found.holds and found.during_import:
            stubs.enter_context(found.during_import())
    import thunder
"""


def test_importing_jointtrace_imports_neither_thunder_nor_torch(python):
    python("import jointtrace, sys; assert not {'thunder', 'torch'} & set(sys.modules)")


def test_thunder_runs_after_jointtrace(python):
    python("import jointtrace" + USE)


def test_our_joint_build_can_come_first(python):
    python("import jointtrace.joint.build" + USE)


def test_a_submodule_of_thunder_can_come_first(python):
    python("import jointtrace; import thunder.core.prims" + USE)


@WORKS_ALONE
def test_thunder_imported_before_jointtrace_is_repaired_too(python):
    python("import thunder, jointtrace" + USE)


@BREAKS_ALONE
def test_thunder_alone_gives_its_own_error(python):
    failed = python("import thunder", check=False)
    assert failed.returncode != 0
    assert "AttributeError" in failed.stderr
    assert "jointtrace" not in failed.stderr


@BREAKS_ALONE
def test_jointtrace_clears_up_after_a_failed_import_of_thunder(python):
    python(f"""
try:
    import thunder
except AttributeError:
    pass
else:
    raise SystemExit('expected to fail')
import sys
assert any(name.startswith('thunder.') for name in sys.modules)
import jointtrace
assert not any(name.startswith('thunder.') for name in sys.modules)
{USE}""")


def test_thunder_imported_by_other_means_is_repaired_too(python):
    python(f"""
{IMPORT_WITHOUT_US}
assert not all(found.repaired for found in BREAKS if found.holds)
import importlib, jointtrace
importlib.reload(jointtrace)
{USE}""")


def test_the_finder_is_installed_once(python):
    python("""
import importlib, sys, jointtrace
importlib.reload(jointtrace)
assert sum('jointtrace' in type(finder).__module__ for finder in sys.meta_path) == 1
""")


def test_thunder_keeps_its_own_loader(python):
    python("""
import jointtrace, thunder
assert 'jointtrace' not in type(thunder.__loader__).__module__
assert thunder.__spec__.loader is thunder.__loader__
""")


def test_torch_is_left_as_it_was(python):
    python("""
import torch
def names(owner):
    return {name: value for name, value in vars(owner).items() if not name.startswith('_')}
owners = (torch.Tensor, torch.autograd.Function)
before = [names(owner) for owner in owners]
import jointtrace, thunder
assert [names(owner) for owner in owners] == before
assert not hasattr(torch, 'align_tensors') or torch.__version__ < '2.13'
""")


def test_thunder_fails_to_import_whole_when_it_cannot_be_patched(python):
    python("""
import sys, jointtrace
from jointtrace.compat import importing, repeated_argument
from jointtrace.compat.breaks import Break
from jointtrace.compat.patching import Patch, is_applied
good = repeated_argument.PATCHES
importing.BREAKS += (Break('made up', '>=2.10', patches=(Patch('thunder.core.jit_ext', 'gone', id),)),)
try:
    import thunder
except ImportError as error:
    assert 'thunder.core.jit_ext.gone' in str(error), error
else:
    raise SystemExit('expected to fail')
assert not any(name.partition('.')[0] == 'thunder' for name in sys.modules)
importing.BREAKS = importing.BREAKS[:-1]
import thunder
assert all(map(is_applied, good))
""")


def test_patches_come_off_an_imported_thunder_when_the_front_end_cannot_be_attached(python):
    python(f"""
{IMPORT_WITHOUT_US}
from jointtrace.compat import importing, repeated_argument
from jointtrace.compat.patching import is_applied
importing.FRONT_END = 'os:no_such_function'
try:
    importing.activate()
except AttributeError:
    pass
else:
    raise SystemExit('expected to fail')
assert not any(map(is_applied, repeated_argument.PATCHES))
""")


def test_thunder_can_be_imported_again_after_the_front_end_could_not_be_attached(python):
    python("""
import jointtrace, sys
from jointtrace.compat import importing, repeated_argument
from jointtrace.compat.patching import is_applied
importing.FRONT_END = 'os:no_such_function'
try:
    import thunder
except AttributeError:
    pass
else:
    raise SystemExit('expected to fail')
assert 'thunder' not in sys.modules
importing.FRONT_END = 'os:getpid'
import thunder
assert all(map(is_applied, repeated_argument.PATCHES))
""")


def test_importing_jointtrace_from_within_thunder_is_refused(python):
    done = python("""
import sys, types
from importlib.machinery import ModuleSpec
thunder = types.ModuleType('thunder')
thunder.__spec__ = ModuleSpec('thunder', None)
thunder.__spec__._initializing = True
sys.modules['thunder'] = thunder
import jointtrace
""", check=False)
    assert done.stderr.strip().splitlines()[-1].startswith("ImportError: jointtrace was imported from within")
