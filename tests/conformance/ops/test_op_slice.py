"""A slice of the conformance run: operators of every family through both front ends."""
from __future__ import annotations

import pytest
from conformance.ops.expected import verdict_of
from conformance.ops.judge import Verdict, judge

FAMILIES = """
    add copysign div.floor_rounding erf exp lerp minimum mul pow remainder sigmoid special.erfcx tanh where
    amax cumprod cumsum kthvalue logcumsumexp logsumexp masked.mean max.reduction_with_dim linalg.vector_norm prod
    std.unbiased var sort topk quantile softmax
    addmm baddbmm bmm einsum linalg.cholesky linalg.inv linalg.lu linalg.norm linalg.qr matmul outer
    as_strided cat chunk diag expand flip hstack meshgrid.list_of_tensors permute repeat roll split squeeze stack
    movedim tril unfold view_as_complex fft.rfft gradient
    gather index_add index_put index_select masked_fill scatter_add select
    native_layer_norm nn.functional.avg_pool2d nn.functional.batch_norm
    nn.functional.binary_cross_entropy_with_logits nn.functional.conv2d nn.functional.conv_transpose1d
    nn.functional.cosine_embedding_loss nn.functional.cross_entropy nn.functional.embedding nn.functional.gelu
    nn.functional.grid_sample nn.functional.group_norm nn.functional.interpolate.bilinear nn.functional.linear
    nn.functional.max_pool1d nn.functional.pad.reflect nn.functional.scaled_dot_product_attention
    nn.functional.dropout nn.functional.rrelu
"""
IN_FLOAT64_TOO = """
    addmm cumsum index_put linalg.inv linalg.vector_norm prod sort unfold nn.functional.dropout nn.functional.rrelu
"""
REFUSED = """
    combinations cov linalg.eig to_sparse nn.functional.alpha_dropout
"""
CASES = [(op, "float32") for op in (*FAMILIES.split(), *REFUSED.split())]
CASES += [(op, "float64") for op in IN_FLOAT64_TOO.split()]


@pytest.mark.filterwarnings("ignore")  # of torch and thunder, for single operators
@pytest.mark.parametrize("front", ["thunder", "torch.compile"])
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_an_operator_has_the_expected_verdict(op, dtype, front):
    found = judge(op, dtype, front, count=2)
    assert found.verdict is verdict_of(op, front), found.reason


def test_what_is_refused_is_in_the_slice_because_it_is_expected():
    assert all(verdict_of(op, "thunder") is not Verdict.PASS for op in REFUSED.split() if op != "linalg.eig")
