"""named_tensors: the removed methods exist while the block runs, and only then."""
from __future__ import annotations

import pytest
import torch

from jointtrace.compat.named_tensors import TORCH, stubs
from jointtrace.compat.versions import torch_in

pytestmark = pytest.mark.skipif(not torch_in(TORCH), reason=f"holds for torch{TORCH}")


def test_the_methods_exist_only_inside_the_block():
    assert not hasattr(torch.Tensor, "rename_")
    with stubs():
        assert callable(torch.Tensor.rename_)
        assert callable(torch.align_tensors)
    assert not hasattr(torch.Tensor, "rename_")
    assert not hasattr(torch, "align_tensors")


def test_they_go_when_the_block_fails():
    with pytest.raises(KeyError), stubs():
        raise KeyError
    assert not hasattr(torch.Tensor, "align_to")


def test_a_call_says_what_happened():
    with stubs(), pytest.raises(NotImplementedError, match="torch removed rename"):
        torch.ones(2).rename("N")


def test_a_method_that_exists_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "align_as", "present", raising=False)
    with stubs():
        assert torch.Tensor.align_as == "present"
    assert torch.Tensor.align_as == "present"


def test_thunders_list_of_torch_functions_holds_none_that_torch_has_not():
    from thunder.torch import _get_torch_function_name
    from thunder.torch.default_torch_ops import torch_auto_registered_ops

    names = [_get_torch_function_name(module, fn) for module, fns in torch_auto_registered_ops.items() for fn in fns]
    assert "align_as" not in names
    assert len(names) > 300
