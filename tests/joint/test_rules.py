"""Gradient rules: ours for what torch has fused kernels for, and those of thunder that we mend, against eager."""
from __future__ import annotations

import pytest
import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from numerics.oracle import assert_like_eager, jit, leaf
from thunder.extend import ImplInfo
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.checkpoint import checkpoint

import jointtrace
from jointtrace.joint.rules import OPERATORS

KERNEL = "cpu_attention"


def qkv(*shape, dtype=torch.float32):
    return tuple(leaf(*(shape or (2, 4, 9, 8)), dtype=dtype) for _ in range(3))


def uses_kernel(compiled):
    return KERNEL in jointtrace.dump(compiled)


@pytest.mark.parametrize(("options", "mask"), [
    ({}, None),
    ({"is_causal": True}, None),
    ({"scale": 0.3}, None),
    ({}, torch.rand(9, 9) > 0.3),
    ({}, torch.rand(2, 1, 9, 9) > 0.3),
    ({}, torch.rand(1, 9) > 0.3),
    ({}, torch.randn(9, 9)),
], ids=["plain", "causal", "scale", "boolean mask", "boolean mask of 4 dimensions", "key mask", "additive mask"])
def test_attention_has_its_kernel_and_eagers_gradients(options, mask):
    compiled = assert_like_eager(lambda q, k, v, m: attention(q, k, v, attn_mask=m, **options), *qkv(), mask)
    assert uses_kernel(compiled)


def test_attention_with_grouped_queries():
    compiled = assert_like_eager(
        lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True),
        leaf(2, 4, 9, 8), leaf(2, 2, 9, 8), leaf(2, 2, 9, 8))
    assert uses_kernel(compiled)


def test_attention_of_three_dimensions_is_decomposed():
    compiled = assert_like_eager(lambda q, k, v: attention(q, k, v, is_causal=True), *qkv(4, 9, 8))
    assert not uses_kernel(compiled)


def test_torchs_switch_of_attention_kernels_decomposes_it():
    with sdpa_kernel(SDPBackend.MATH):
        compiled = assert_like_eager(lambda q, k, v: attention(q, k, v, is_causal=True), *qkv())
    assert not uses_kernel(compiled)


@pytest.mark.parametrize("make_mask", [lambda m: m, lambda m: m * 2], ids=["argument", "computed"])
def test_a_mask_that_requires_a_gradient_gets_it(make_mask):
    compiled = assert_like_eager(lambda q, k, v, m: attention(q, k, v, attn_mask=make_mask(m)), *qkv(), leaf(9, 9))
    assert not uses_kernel(compiled)


def test_a_mask_with_a_gradient_does_not_change_the_rule_of_one_without():
    def both(q, k, v, m):
        return attention(q, k, v, attn_mask=m.detach()) + attention(q, k, v, attn_mask=m)

    assert uses_kernel(assert_like_eager(both, *qkv(), leaf(9, 9)))


def test_attention_in_bfloat16():
    program = lambda q, k, v: attention(q, k, v, is_causal=True)  # noqa: E731
    assert uses_kernel(assert_like_eager(program, *qkv(dtype=torch.bfloat16), rtol=2e-2, atol=2e-2))


def test_attention_in_bfloat16_with_a_boolean_mask():
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    program = lambda q, k, v: attention(q, k, v, attn_mask=mask)  # noqa: E731
    assert uses_kernel(assert_like_eager(program, *qkv(dtype=torch.bfloat16), rtol=2e-2, atol=2e-2))


def test_attention_of_transposed_tensors():
    def heads_last(q, k, v):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return attention(q, k, v, is_causal=True).transpose(1, 2)

    assert_like_eager(heads_last, *qkv(2, 9, 4, 8))


def test_attention_of_a_tensor_with_itself_adds_three_gradients():
    assert_like_eager(lambda x: attention(x, x, x, is_causal=True), leaf(2, 4, 9, 8))


def test_attention_in_a_checkpoint():
    assert_like_eager(lambda *t: checkpoint(lambda q, k, v: attention(q, k, v), *t, use_reentrant=False), *qkv())


def test_attention_with_dropout_uses_one_mask_in_both_directions():
    q, k, v = qkv()
    out = jit(lambda q, k, v: attention(q, k, v, dropout_p=0.5))(q, k, v)
    g = torch.randn_like(out)
    out.backward(g)
    torch.testing.assert_close((out * g).sum(), (v * v.grad).sum())  # the result is linear in v
    assert not torch.allclose(out, attention(q, k, v))


@pytest.mark.parametrize("program", [
    F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), lambda x: torch.softmax(x, 0), lambda x: x.log_softmax(1),
], ids=["silu", "gelu", "gelu by tanh", "softmax", "log_softmax"])
def test_activations(program):
    assert_like_eager(lambda x: program(x * 2), leaf(3, 4))


def test_a_rule_is_not_used_where_its_checker_refuses_though_all_parts_have_rules(monkeypatch):
    def wrong(a, target, *args, **kwargs):
        raise AssertionError("the checker said no")

    refusing = ImplInfo(execution_transform=wrong, grad_transform=wrong, checker=lambda *args, **kwargs: False)
    monkeypatch.setitem(OPERATORS.implmap, ltorch.cross_entropy.id, refusing)
    assert_like_eager(lambda x: F.cross_entropy(x, torch.tensor([2, 0, 1])), leaf(3, 4))


def test_softmax_into_another_dtype():
    assert_like_eager(lambda x: F.softmax(x, -1, dtype=torch.float64), leaf(3, 4))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(affine, bias):
    assert_like_eager(torch.nn.LayerNorm((3, 4), elementwise_affine=affine, bias=bias), leaf(2, 3, 4))


def test_layer_norm_gradient_with_a_cotangent_of_stride_zero():
    assert_like_eager(lambda x, w: F.layer_norm(x, (4,), w), leaf(3, 4), leaf(4), loss=lambda out: out.sum())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nll_loss_with_weights_and_ignored_targets(reduction):
    def loss(x, weight, y):
        return F.cross_entropy(x, y, weight=weight, ignore_index=2, reduction=reduction)

    assert_like_eager(loss, leaf(5, 4), torch.rand(4), torch.tensor([0, 1, 2, 3, 2]))


def test_cross_entropy_with_smoothed_labels():
    assert_like_eager(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), leaf(3, 4), torch.tensor([0, 1, 3]))


def test_rotary_embedding_by_complex_numbers():
    def rotate(x, turns):
        return torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2)) * turns)

    assert_like_eager(rotate, leaf(3, 4), torch.polar(torch.ones(6), torch.arange(6.0)))


def test_a_step_function_lets_no_gradient_through():
    assert_like_eager(lambda x: (x.floor() * x, x.ceil()), leaf(4))


def test_no_step_function_under_no_grad_requires_a_gradient():
    def program(x):
        with torch.no_grad():
            low = x.floor()
        return low, x.sin()

    assert_like_eager(program, leaf(4))
