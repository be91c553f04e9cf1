"""Types of numbers: half precision, double precision, complex, integers, and autocast inside and outside."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numerics.oracle import leaf

pytestmark = pytest.mark.filterwarnings("ignore:torch.get_autocast_:DeprecationWarning")  # thunder's own calls
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=str)
def test_a_network_of_one_type(like_eager, dtype):
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype in HALVES else {"rtol": 1e-12, "atol": 1e-12}
    # half precision: rounding of intermediate results differs between equal formulas
    like_eager(layers.to(dtype), leaf(3, 4, dtype=dtype), **close)


@pytest.mark.also_fused
def test_types_are_mixed(like_eager):
    def program(x, w, n):
        return x * w, x.double() * w, w.to(torch.bfloat16) + n, x + n, n / 2

    like_eager(program, leaf(3), leaf(3, dtype=torch.float64), torch.arange(3), rtol=1e-2, atol=1e-2)  # bfloat16


def test_a_scalar_tensor_does_not_widen_the_type(like_eager):
    like_eager(lambda x, s: (x * s, x + s.to(x.dtype)), leaf(3), leaf(dtype=torch.float64))


def test_there_and_back_through_half_precision(like_eager):
    like_eager(lambda x: x.to(torch.bfloat16).sin().float() * x, leaf(4), rtol=1e-2, atol=1e-2)  # bfloat16


def test_integers_and_booleans_are_counted_with(like_eager):
    def program(x, i):
        hot = F.one_hot(i, 4)
        return x * hot, (x > 0).sum(), (x > 0).cumsum(0) * x, x * (i // 2), ~(x > 0)

    like_eager(program, leaf(4, 4), torch.tensor([0, 3, 1, 2]))


def test_division_of_integers(like_eager):
    like_eager(lambda x, i: (i / 2 * x, torch.div(i, 2, rounding_mode="floor") * x, -i // 2), leaf(3), torch.arange(3))


def real(outputs):
    return sum((torch.view_as_real(out).cos().sum() if out.is_complex() else out.sin().sum()) for out in outputs)


def test_products_of_complex_numbers(like_eager):
    def program(a, b):
        return a * b, a - 2j * b, a.conj() * a

    like_eager(program, leaf(3, dtype=torch.complex64), leaf(3, dtype=torch.complex64), loss=real)


def test_slices_of_complex_numbers(like_eager):
    like_eager(lambda z: (z[1:] * z[:-1], z[::2], z[0]), leaf(4, dtype=torch.complex64), loss=real)


def test_rotary_embedding_by_complex_numbers(like_eager):
    def program(q, frequencies):
        z = torch.view_as_complex(q.reshape(3, 4, 2))
        return (torch.view_as_real(z * frequencies).flatten(1),)

    like_eager(program, leaf(3, 8), torch.polar(torch.ones(3, 4), torch.randn(3, 4)), loss=real)


def test_a_fourier_transform(like_eager):
    like_eager(lambda x: (torch.fft.irfft(torch.fft.rfft(x) * 2, n=8),), leaf(8), loss=real)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_outside(same_story, dtype):
    def story(fn, x):
        with torch.autocast("cpu", dtype):
            out = fn(x)
            loss = out.float().square().sum()
        loss.backward()
        return out

    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    same_story(story, layers, leaf(3, 4), rtol=2e-2, atol=2e-2)  # half precision


def test_autocast_inside(like_eager):
    def program(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        return y, y.float() * 2

    like_eager(program, leaf(3, 4), leaf(4, 2), rtol=2e-2, atol=2e-2)  # bfloat16


def test_autocast_is_switched_off_inside(same_story):
    def story(fn, x, w):
        with torch.autocast("cpu", torch.bfloat16):
            out = fn(x, w)
        out.float().sum().backward()
        return out

    def program(x, w):
        with torch.autocast("cpu", enabled=False):
            y = x @ w
        return (y @ w).float() + y

    same_story(story, program, leaf(3, 3), leaf(3, 3), rtol=3e-2, atol=3e-2)  # bfloat16


def test_a_backward_inside_autocast(same_story):
    def story(fn, x, w):
        out = fn(x, w)
        with torch.autocast("cpu", torch.bfloat16):
            out.square().sum().backward()
        return out

    same_story(story, lambda x, w: (x @ w).sin(), leaf(3, 4), leaf(4, 3), rtol=2e-2, atol=2e-2)  # bfloat16


def test_autocast_comes_and_goes_between_calls(same_story):
    def story(fn, x, w):
        outs = [fn(x, w)]
        with torch.autocast("cpu", torch.bfloat16):
            outs.append(fn(x, w))
        outs.append(fn(x, w))
        sum(out.float().sum() for out in outs).backward()
        return outs

    same_story(story, lambda x, w: x @ w, leaf(3, 4), leaf(4, 2), rtol=2e-2, atol=2e-2)  # bfloat16


def test_another_type_comes_with_the_next_call(compile_fn, like_eager):
    def program(x):
        return (x * 2).sin()

    compiled = compile_fn(program)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        like_eager(program, leaf(3, dtype=dtype), compiled=compiled, rtol=1e-2, atol=1e-2)  # bfloat16


def test_the_default_type_is_doubled(like_eager):
    torch.set_default_dtype(torch.float64)
    try:
        like_eager(lambda x: x * torch.ones(3) + torch.full((3,), 0.5) + torch.arange(3) / 2, leaf(3))
    finally:
        torch.set_default_dtype(torch.float32)
