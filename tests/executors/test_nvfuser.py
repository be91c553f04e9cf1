from __future__ import annotations

import importlib.util

import pytest
import torch

from jointtrace.errors import UnsupportedError
from jointtrace.executors.nvfuser import NvfuserExecutor
from jointtrace.ir.op import Op, Target

MISSING = NvfuserExecutor().unavailable()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so():
    assert "needs a CUDA device" in MISSING


def test_without_the_module_it_says_which_torch_it_exists_for(monkeypatch):
    if importlib.util.find_spec("nvfuser_direct"):
        pytest.skip("the module is there")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = NvfuserExecutor().unavailable()
    assert "nvfuser_direct is missing" in reason
    assert torch.__version__ in reason


@pytest.mark.skipif(MISSING is None, reason="nvFuser is there")
def test_used_all_the_same_it_raises_with_the_reason():
    with pytest.raises(UnsupportedError, match="'nvfuser' is unavailable"):
        NvfuserExecutor().compile(Op(Target("nvfuser_0_fw")))
