from __future__ import annotations

import math

import pytest
import torch

from jointtrace.executors.torch_compile import compile_with_inductor
from jointtrace.ir.aten import tags_of
from jointtrace.ir.draw import counter_draws
from jointtrace.ir.op import Op, Tag, Target, TensorType, Var
from jointtrace.ir.trace import Trace

draws = torch.ops.jointtrace
CPU = torch.device("cpu")
COUNT = 200_000
FORMS = pytest.mark.parametrize("form", [draws.counter_draw, draws.generator_draw], ids=["counter", "generator"])
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def seeds(count=1):
    return draws.seeds(count, CPU)


def drawn(form, kind, shape=(COUNT,), dtype=torch.float32, seed=None, **options):
    return form(seeds()[0] if seed is None else seed, list(shape), kind, dtype=dtype, device=CPU, **options)


def assert_mean(values, expected, deviation):
    """Five standard errors: fails by chance once in two million."""
    assert abs(values.double().mean().item() - expected) < 5 * deviation / math.sqrt(values.numel()) + 1e-9


@FORMS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform_numbers_fill_the_unit_interval(form, dtype):
    numbers = drawn(form, "uniform", dtype=dtype)
    assert numbers.dtype == dtype
    assert numbers.min() >= 0
    assert numbers.max() < 1
    grain = {torch.bfloat16: 2**-9, torch.float16: 2**-12}.get(dtype, 0.0)  # numbers are rounded down to it
    assert_mean(numbers.double() + grain, 0.5, math.sqrt(1 / 12))
    assert_mean((numbers.double() + grain - 0.5) ** 2, 1 / 12, math.sqrt(1 / 180))
    if form is draws.generator_draw:
        return  # how evenly torch itself draws
    counts = torch.histc(numbers.float(), 64, 0, 1)
    assert ((counts - COUNT / 64) ** 2 / (COUNT / 64)).sum() < 150  # chi squared with 63 degrees of freedom: mean 63


@FORMS
def test_normal_numbers_have_the_moments_of_the_distribution(form):
    numbers = drawn(form, "normal").double()
    assert_mean(numbers, 0, 1)
    assert_mean(numbers**2, 1, math.sqrt(2))
    assert_mean(numbers**3, 0, math.sqrt(15))
    assert_mean(numbers**4, 3, math.sqrt(96))
    assert numbers.abs().max() > 4


@FORMS
@pytest.mark.parametrize("p", [0.0, 0.1, 0.7, 1.0])
def test_bernoulli_keeps_the_given_rate(form, p):
    mask = drawn(form, "bernoulli", dtype=torch.bool, p=p)
    assert_mean(mask, p, math.sqrt(p * (1 - p)))


@FORMS
def test_bits_are_62_fair_coins(form):
    bits = drawn(form, "bits", dtype=torch.int64)
    assert bits.min() >= 0
    for digit in range(62):
        assert_mean(bits >> digit & 1, 0.5, 0.5)
    assert bits.max() < 2**62


@FORMS
def test_two_seeds_give_independent_numbers(form):
    first, second = (drawn(form, "uniform", seed=seed).double() for seed in seeds(2))
    assert_mean((first - 0.5) * (second - 0.5), 0, 1 / 12)
    assert (first == second).double().mean() < 1e-4


def test_neighbouring_numbers_are_independent():
    numbers = drawn(draws.counter_draw, "uniform").double() - 0.5
    for lag in (1, 2, 3, 64, 1000):
        assert_mean(numbers[lag:] * numbers[:-lag], 0, 1 / 12)


def test_seeds_that_differ_in_one_bit_give_independent_numbers():
    seed = seeds()[0]
    numbers = drawn(draws.counter_draw, "uniform", seed=seed).double() - 0.5
    for bit in (20, 31, 32, 45, 62):
        other = drawn(draws.counter_draw, "uniform", seed=seed ^ (1 << bit)).double() - 0.5
        assert_mean(numbers * other, 0, 1 / 12)
        table = torch.histc((numbers + 0.5).mul(32).floor() * 32 + (other + 0.5).mul(32).floor(), 1024, 0, 1024)
        assert ((table - COUNT / 1024) ** 2 / (COUNT / 1024)).sum() < 1023 + 6 * math.sqrt(2046)


def test_both_words_of_a_double_are_independent():
    bits = drawn(draws.counter_draw, "bits", dtype=torch.int64)
    high, low = (bits >> 31).double() / 2**31 - 0.5, (bits & (2**31 - 1)).double() / 2**31 - 0.5
    assert_mean(high * low, 0, 1 / 12)


@FORMS
def test_strides_may_follow_another_order_and_the_draw_still_repeats(form):
    seed = seeds()[0]
    first, second = (drawn(form, "uniform", (2, 3, 4), seed=seed, order=[0, 2, 1]) for _ in range(2))
    assert first.shape == (2, 3, 4)
    assert first.stride() == (12, 1, 3)
    assert torch.equal(first, second)


def test_seeds_come_from_the_global_generator():
    torch.manual_seed(5)
    first, following = seeds(3), seeds(3)
    torch.manual_seed(5)
    assert first == seeds(3)
    assert first != following
    assert len({int(seed) for seed in (*first, *following)}) == 6


def test_seeds_share_no_memory():
    torch.library.opcheck(draws.seeds.default, (3, CPU), test_utils="test_schema")
    assert len({seed.untyped_storage().data_ptr() for seed in seeds(3)}) == 3


def test_only_seeds_are_random_and_draws_are_pure():
    assert tags_of(draws.seeds.default) == {Tag.RANDOM}
    assert tags_of(draws.counter_draw.default) == tags_of(draws.generator_draw.default) == frozenset()


@FORMS
def test_a_draw_leaves_the_global_generator_alone(form):
    seed = seeds()[0]
    before = torch.get_rng_state()
    drawn(form, "normal", seed=seed)
    assert torch.equal(before, torch.get_rng_state())


def test_rounding_of_normal_numbers_to_float32_is_never_in_doubt():
    numbers = (torch.arange(2**23, dtype=torch.float64) * 2 + 1) * 2.0**-24  # the other half has the opposite sign
    exact = torch.erfinv(numbers) * math.sqrt(2)
    rounded = exact.float()
    for towards in (-math.inf, math.inf):
        neighbour = torch.nextafter(rounded, torch.full_like(rounded, towards))
        turning_point = (rounded.double() + neighbour.double()) / 2
        assert ((turning_point - exact).abs() / exact).min() > 2.0**-48


def test_float64_normals_are_left_to_the_generator():
    assert not counter_draws("normal", torch.float64)
    assert counter_draws("uniform", torch.float64)
    assert not counter_draws("uniform", torch.complex64)


def test_compiled_draws_equal_eager_ones_to_the_last_bit():
    cases = [("uniform", torch.float64), ("uniform", torch.bfloat16), ("normal", torch.bfloat16)]
    cases.append(("bernoulli", torch.bool))
    shape, order = [371, 50, 29], [2, 0, 1]  # whole vectors and a rest; so many that rounding twice shows
    args = {"p": 0.3, "device": CPU, "order": order}
    target = Target("jointtrace.counter_draw.default", draws.counter_draw.default)
    ops, types = [], {"seed": TensorType((), torch.int64)}
    for i, (kind, dtype) in enumerate(cases):
        ops.append(Op(target, (Var("seed"), shape, kind), {**args, "dtype": dtype}, Var(f"v{i}")))
        ops.append(Op(Target("add", torch.add), (Var(f"v{i}"), 0.1), out=Var(f"w{i}")))  # arithmetic to melt with
        types |= {f"{name}{i}": TensorType(tuple(shape), dtype) for name in "vw"}
    outputs = tuple(Var(f"{name}{i}") for name in "vw" for i in range(len(cases)))
    seed = seeds()[0]
    compiled = compile_with_inductor(Trace(("seed",), tuple(ops), outputs, types=types), [seed], is_backward=False)
    for (kind, dtype), value in zip(cases, compiled([seed.clone()]), strict=False):
        eager = draws.counter_draw(seed, shape, kind, dtype=dtype, **args)
        assert torch.equal(value, eager), (kind, dtype)
        assert value.stride() == eager.stride()


def test_the_rounding_of_normal_numbers_outlives_inductors_passes():
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch.fx.experimental.proxy_tensor import make_fx

    def drawn_and_converted(seed):
        return drawn(draws.counter_draw, "normal", (8,), seed=seed).to(torch.bfloat16)

    graph = make_fx(drawn_and_converted, decomposition_table=select_decomp_table(), tracing_mode="fake")(seeds()[0])
    converts = [node for node in joint_graph_passes(graph).graph.nodes if "convert_element_type" in str(node.target)]
    assert [node.args[1] for node in converts] == [torch.float64, torch.float32, torch.bfloat16]
