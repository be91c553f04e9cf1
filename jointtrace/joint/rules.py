"""Our own gradient rules for thunder symbols: where thunder decomposes what torch has a fused backward for.

They live in one operator executor, `OPERATORS`, behind the executors the user names: those claim first. Each rule saves
what eager PyTorch saves for the same call. Formulas are those of torch's derivatives.yaml, by the torch operators that
implement them.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes, prims
from thunder.core.prims import get_grad, put_grad
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.transforms import sum_to
from thunder.executors import torchex
from thunder.extend import OperatorExecutor

ATEN = torch.ops.aten
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
KEEP = (prims.OpTags.DONT_AUTO_RECOMPUTE_IN_BACKWARD,)

OPERATORS: Any = OperatorExecutor("jointtrace", version=1)  # not registered: thunder's list of executors stays its own


def _like(tensor: TensorProxy, shape: Sequence[int] | None = None, dtype: Any = None) -> TensorProxy:
    return TensorProxy(like=tensor, shape=tensor.shape if shape is None else shape, dtype=dtype, requires_grad=False)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, TensorProxy)


# repeat, no times: thunder returns a constant, which eager says has a gradient

def _repeat_of_nothing(a: TensorProxy, /, *repeats: Any) -> TensorProxy:
    out = ltorch.repeat(a, *repeats)
    assert out.numel == 0
    put_grad(a, ltorch.mul(ltorch.zeros_like(a), ltorch.sum(get_grad(out))))
    return out


OPERATORS.register_implementation(
    ltorch.repeat, torchex.repeat, grad_transform=_repeat_of_nothing,
    checker=lambda a, *repeats: a.numel == 0 or 0 in tree_flatten(repeats)[0])


# silu, gelu

silu_backward = OPERATORS.register_operator(
    "silu_backward", meta=lambda g, a: _like(a), fn=ATEN.silu_backward.default)
gelu_backward = OPERATORS.register_operator(
    "gelu_backward", meta=lambda g, a, approximate: _like(a),
    fn=lambda g, a, approximate: ATEN.gelu_backward.default(g, a, approximate=approximate))


def _silu(a: TensorProxy, /, inplace: bool = False) -> TensorProxy:
    out = ltorch.silu(a)
    put_grad(a, silu_backward(get_grad(out), a))
    return out


def _gelu(a: TensorProxy, /, *, approximate: str = "none") -> TensorProxy:
    out = ltorch.gelu(a, approximate=approximate)
    put_grad(a, gelu_backward(get_grad(out), a, approximate))
    return out


OPERATORS.register_implementation(
    ltorch.silu, torchex.silu, grad_transform=_silu, checker=lambda a, inplace=False: _is_tensor(a) and not inplace)
OPERATORS.register_implementation(
    ltorch.gelu, torchex.gelu, grad_transform=_gelu, checker=lambda a, **_: _is_tensor(a))


# product of complex numbers: thunder's rule does not conjugate

conj = OPERATORS.register_operator("conj", meta=lambda a: _like(a), fn=torch.conj_physical)


def _complex_mul(a: Any, b: Any) -> TensorProxy:
    out = prims.mul(a, b)
    grad = get_grad(out)
    for operand, other in ((a, b), (b, a)):
        if _is_tensor(operand):
            put_grad(operand, prims.mul(grad, conj(other) if _is_tensor(other) else complex(other).conjugate()))
    return out


OPERATORS.register_implementation(
    prims.mul, torchex.mul, grad_transform=_complex_mul,
    checker=lambda a, b: any(_is_tensor(t) and dtypes.is_complex_dtype(t.dtype) for t in (a, b)))


# softmax

softmax_backward = OPERATORS.register_operator(
    "softmax_backward", meta=lambda g, out, dim: _like(out),
    fn=lambda g, out, dim: ATEN._softmax_backward_data.default(g, out, dim, out.dtype))


def _softmax(a: TensorProxy, /, dim: int, *, dtype: Any = None) -> TensorProxy:
    out = ltorch._softmax(a, dim, dtype=dtype)
    put_grad(a, softmax_backward(get_grad(out), out, dim))
    return out


OPERATORS.register_implementation(
    ltorch._softmax, grad_transform=_softmax, execution_transform=torchex._softmax_transform,
    checker=lambda a, dim, *, dtype=None: dtype is None and dtypes.is_float_dtype(a.dtype))


def _log_softmax(a: TensorProxy, /, dim: int, *, dtype: Any = None) -> TensorProxy:
    """In parts, by torch's own formula: a backward that computes it again needs two kept numbers, and no sum again."""
    shifted = ltorch.sub(a, ltorch.amax(a, dim, True))
    out = ltorch.sub(shifted, ltorch.log(ltorch.sum(ltorch.exp(shifted), dim, True)))
    put_grad(a, ltorch.log_softmax_backward(get_grad(out), out, dim, a.dtype))
    return out


OPERATORS.register_implementation(
    ltorch.log_softmax, grad_transform=_log_softmax, execution_transform=torchex._log_softmax_transform,
    checker=lambda a, dim, *, dtype=None: dtype is None and a.dtype in (dtypes.float32, dtypes.float64) and a.numel > 0)


# layer_norm

def _layer_norm_forward_meta(a: TensorProxy, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    outer = (*a.shape[: a.ndim - len(shape)], *(1 for _ in shape))
    statistics = dtypes.float32 if a.dtype in (dtypes.bfloat16, dtypes.float16) else a.dtype
    return _like(a), _like(a, outer, statistics), _like(a, outer, statistics)


def _layer_norm_backward_meta(g: Any, a: TensorProxy, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
    return _like(a), None if weight is None else _like(weight), None if bias is None else _like(bias)


def _layer_norm_backward_impl(g: Any, a: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
    mask = [True, weight is not None, bias is not None]
    return ATEN.native_layer_norm_backward.default(g.contiguous(), a, shape, mean, rstd, weight, bias, mask)


layer_norm_forward = OPERATORS.register_operator(
    "layer_norm_forward", meta=_layer_norm_forward_meta, fn=ATEN.native_layer_norm.default)
layer_norm_backward = OPERATORS.register_operator(
    "layer_norm_backward", meta=_layer_norm_backward_meta, fn=_layer_norm_backward_impl)


def _layer_norm(
    a: TensorProxy, /, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> TensorProxy:
    out, mean, rstd = layer_norm_forward(a, tuple(normalized_shape), weight, bias, eps)
    grads = layer_norm_backward(get_grad(out), a, tuple(normalized_shape), mean, rstd, weight, bias)
    for operand, grad in zip((a, weight, bias), grads, strict=True):
        if operand is not None:
            put_grad(operand, grad)
    return out


def _layer_norm_checker(a: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5) -> bool:
    return all(operand is None or operand.dtype == a.dtype for operand in (weight, bias))


OPERATORS.register_implementation(
    ltorch.layer_norm, torchex.layer_norm, grad_transform=_layer_norm, checker=_layer_norm_checker)


# nll_loss (and cross_entropy, which thunder makes of it); thunder forgets the shape of more dimensions than one

def _nll_forward_meta(a: TensorProxy, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    batch = target.shape if reduction == REDUCTIONS["none"] else ()
    return _like(a, batch), _like(a, ())


def _nll_operators(forward: Any, backward: Any) -> tuple[Any, Any]:
    name = forward.__name__.removesuffix(".default").removesuffix("_forward")
    return (OPERATORS.register_operator(f"{name}_forward", meta=_nll_forward_meta, fn=forward),
            OPERATORS.register_operator(f"{name}_grad", meta=lambda g, a, *rest: _like(a), fn=backward))


nll_of_rows = _nll_operators(ATEN.nll_loss_forward.default, ATEN.nll_loss_backward.default)
nll_of_images = _nll_operators(ATEN.nll_loss2d_forward.default, ATEN.nll_loss2d_backward.default)


def _nll_loss(
    a: TensorProxy, /, target: TensorProxy, weight: Any = None, ignore_index: int | None = None, reduction: str = "mean"
) -> TensorProxy:
    settings = REDUCTIONS[reduction], -1 if ignore_index is None else ignore_index
    forward, backward = nll_of_rows if a.ndim < 3 else nll_of_images
    image, labels = a, target
    if a.ndim > 2:  # one image of one row: what torch makes of any number of dimensions
        image = ltorch.reshape(a, (*a.shape[:2], 1, -1))
        labels = ltorch.reshape(target, (a.shape[0], 1, -1))
    loss, total = forward(image, labels, weight, *settings)
    out = ltorch.reshape(loss, target.shape) if a.ndim > 2 and reduction == "none" else loss
    grad = ltorch.reshape(get_grad(out), loss.shape)
    put_grad(a, ltorch.reshape(backward(grad, image, labels, weight, *settings, total), a.shape))
    return out


def _nll_checker(a: Any, target: Any, weight: Any = None, ignore_index: Any = None, reduction: Any = "mean") -> bool:
    matrix = a.ndim in (1, 2) and target.ndim == a.ndim - 1
    images = a.ndim > 2 and a.numel > 0 and tuple(target.shape) == (a.shape[0], *a.shape[2:])
    return (matrix or images) and reduction in REDUCTIONS and (weight is None or not weight.requires_grad)


OPERATORS.register_implementation(
    ltorch.nll_loss, grad_transform=_nll_loss, execution_transform=torchex._nll_loss_transform, checker=_nll_checker)


# max along a dimension: thunder spreads the gradient over ties, torch gives it to the one whose index it returns

def _max_meta(a: TensorProxy, dim: int, keepdim: bool) -> Any:
    shape = torch.empty(a.shape, device="meta").amax(dim, keepdim).shape
    return _like(a, shape), _like(a, shape, dtypes.int64)


max_with_index = OPERATORS.register_operator("max_with_index", meta=_max_meta, fn=torch.max)
max_backward = OPERATORS.register_operator(
    "max_with_index_backward", meta=lambda g, dim, indices, shape, keepdim: _like(g, shape),
    fn=ATEN.value_selecting_reduction_backward.default)


def _max(a: TensorProxy, /, dim: int, keepdim: bool = False) -> Any:
    values, indices = max_with_index(a, dim, keepdim)
    put_grad(a, max_backward(get_grad(values), dim, indices, a.shape, keepdim))
    return values, indices


OPERATORS.register_implementation(
    ltorch.torch_max, max_with_index, grad_transform=_max,
    checker=lambda a, dim=None, keepdim=False: isinstance(dim, int) and a.numel > 0 and dtypes.is_float_dtype(a.dtype))


# scaled_dot_product_attention on CPU: torch's fused kernel, which thunder's sdpa executor leaves to CUDA

def _attention_forward_meta(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any) -> Any:
    statistics = dtypes.float32 if q.dtype in (dtypes.bfloat16, dtypes.float16) else q.dtype
    return _like(q), _like(q, q.shape[:3], statistics)


def _attention_forward(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any) -> Any:
    return ATEN._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)


def _attention_backward(
    g: Any, q: Any, k: Any, v: Any, out: Any, statistics: Any, mask: Any, is_causal: bool, scale: Any
) -> Any:
    return ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default(
        g, q, k, v, out, statistics, 0.0, is_causal, attn_mask=mask, scale=scale)


attention_forward = OPERATORS.register_operator(
    "cpu_attention", meta=_attention_forward_meta, fn=_attention_forward, tags=KEEP)
attention_backward = OPERATORS.register_operator(
    "cpu_attention_backward", meta=lambda g, q, k, v, *rest: (_like(q), _like(k), _like(v)), fn=_attention_backward,
    tags=KEEP)


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None,
) -> TensorProxy:
    mask = attn_mask
    if mask is not None and dtypes.is_boolean_dtype(mask.dtype):
        kept, hidden = (ltorch.full((), fill, device=query.device, dtype=query.dtype) for fill in (0.0, -math.inf))
        mask = ltorch.where(mask, kept, hidden)  # a number in place of a tensor would make it float32
    out, statistics = attention_forward(query, key, value, mask, is_causal, scale)
    grads = attention_backward(get_grad(out), query, key, value, out, statistics, mask, is_causal, scale)
    for operand, grad in zip((query, key, value), grads, strict=True):
        put_grad(operand, grad)
    return out


def _attention_checker(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None,
) -> bool:
    operands = (query, key, value)
    if not torch.backends.cuda.flash_sdp_enabled():  # what `sdpa_kernel` switches, on a CPU too
        return False
    if dropout_p != 0.0 or any(t.device.type != "cpu" or t.ndim != 4 or 0 in t.shape for t in operands):
        return False
    same = query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[1] == key.shape[1] == value.shape[1]
    if not same or len({t.dtype for t in operands}) != 1:
        return False
    if attn_mask is None:
        return True
    fits = dtypes.is_boolean_dtype(attn_mask.dtype) or attn_mask.dtype == query.dtype
    return fits and attn_mask.ndim in (2, 4) and not attn_mask.requires_grad and not is_causal


OPERATORS.register_implementation(
    ltorch.scaled_dot_product_attention, torchex.scaled_dot_product_attention, grad_transform=_attention,
    checker=_attention_checker)


def _grouped_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:
    """thunder's attention with `enable_gqa`, which thunder 0.2.6 does not know: heads of key and value repeat."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = (_repeat_heads(t, query.shape[-3] // t.shape[-3]) for t in (key, value))
    return ltorch.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def _repeat_heads(tensor: Any, times: int) -> Any:
    shape = tensor.shape
    grouped = ltorch.unsqueeze(tensor, -3)
    repeated = ltorch.expand(grouped, (*shape[:-2], times, *shape[-2:]))
    return ltorch.reshape(repeated, (*shape[:-3], shape[-3] * times, *shape[-2:]))


OPERATORS._lookasides[torch.nn.functional.scaled_dot_product_attention] = _grouped_attention


# pad: thunder hands torch a complex value to fill with, which torch takes for real tensors alone

pad = OPERATORS.register_operator(
    "pad_complex", meta=prims.pad.meta, fn=lambda a, value, config: torch.complex(
        torchex._pad_prim_impl(a.real, complex(value).real, config),
        torchex._pad_prim_impl(a.imag, complex(value).imag, config)))
OPERATORS.register_implementation(
    prims.pad, pad, checker=lambda a, value, config: dtypes.is_complex_dtype(a.dtype))


# diagonal: thunder gathers its elements; torch has a view, which shows writes

def _diagonal_meta(a: TensorProxy, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TensorProxy:
    return _like(a, torch.empty(a.shape, device="meta").diagonal(offset, dim1, dim2).shape)


diagonal = OPERATORS.register_operator("diagonal", meta=_diagonal_meta, fn=torch.diagonal)
diagonal_backward = OPERATORS.register_operator(
    "diagonal_backward", meta=lambda g, shape, offset, dim1, dim2: _like(g, shape), fn=ATEN.diagonal_backward.default)


def _diagonal(a: TensorProxy, /, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TensorProxy:
    out = diagonal(a, offset, dim1, dim2)
    put_grad(a, diagonal_backward(get_grad(out), a.shape, offset, dim1, dim2))
    return out


OPERATORS.register_implementation(ltorch.diagonal, diagonal, grad_transform=_diagonal)


# copy_with_setitem: thunder's rule gives a value of another type a gradient of the wrong one

def _copy_with_setitem(a: TensorProxy, index: Any, value: TensorProxy) -> TensorProxy:
    out = prims.copy_with_setitem(a, index, value)
    grad = get_grad(out)
    put_grad(a, prims.copy_with_setitem(grad, index, 0))
    put_grad(value, ltorch.to(sum_to(grad[index], value.shape), value.dtype))
    return out


OPERATORS.register_implementation(
    prims.copy_with_setitem, torchex.copy_with_setitem_impl, grad_transform=_copy_with_setitem,
    checker=lambda a, index, value: _is_tensor(value) and value.dtype != a.dtype)
