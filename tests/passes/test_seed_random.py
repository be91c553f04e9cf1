"""seed_random: the text of what it makes, the distribution of what that draws, whole programs in both front ends."""
from __future__ import annotations

import functools
import math

import pytest
import thunder
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch.utils.checkpoint import checkpoint

from jointtrace import pipeline
from jointtrace.executors.torch_compile import TorchCompileExecutor
from jointtrace.ir.op import Op, Tag, TensorType, Type, Var
from jointtrace.ir.text import parse
from jointtrace.ir.trace import Trace
from jointtrace.ir.verify import verify
from jointtrace.options import Options
from jointtrace.passes.seed_random import seed_random
from jointtrace.runtime.codegen import compile_trace
from jointtrace.runtime.counters import Counters
from jointtrace.runtime.link import link
from tests.strategies import call, run, sample_cotangents, sample_inputs, traces

aten = torch.ops.aten
EVERY = pytest.mark.parametrize(
    ("frontend", "executor"), [(f, e) for f in ("thunder", "dynamo") for e in ("eager", "torch_compile")])

DROPOUT = """
trace (%x: f32[4, 8]) by=test {
  fw:
    (%y: f32[4, 8], %m: b8[4, 8]) = aten.native_dropout.default(%x, 0.25, True)  # [random, recompute] model.py:7
    %r: f32[4, 8] = aten.rand_like.default(%x)  # [random]
  return (%y, %m, %r)
}
"""

NO_DROPOUT = """
trace (%x: f32[4, 8]) by=test {
  fw:
    (%y: f32[4, 8], %m: b8[4, 8]) = aten.native_dropout.default(%x, 0.25, False)  # [random]
  return (%y, %m)
}
"""


def always(op: Op, types: dict[str, Type]) -> bool:
    return True


def never(op: Op, types: dict[str, Type]) -> bool:
    return False


def one(overload, *args, shape=(200_000,), dtype=torch.float32, inputs=None, **kwargs) -> Trace:
    """A trace of one random op over inputs x, y ..."""
    inputs = inputs or {}
    types = {name: TensorType(tuple(value.shape), value.dtype) for name, value in inputs.items()}
    types["r"] = TensorType(tuple(shape), dtype)
    return Trace(tuple(inputs), (call(overload, *args, out=Var("r"), **kwargs),), (Var("r"),), types=types)


def draw(trace: Trace, inputs=(), fused=always) -> torch.Tensor:
    """Run what the pass makes of `trace` by the global generator."""
    seeded = seed_random(trace, fused=fused)
    assert [op.target.name for op in seeded.ops if Tag.RANDOM in op.tags] == ["jointtrace.seeds.default"]
    return compile_trace(seeded)(list(inputs))[0]


def test_what_an_executor_fuses_is_drawn_by_position():
    assert str(seed_random(parse(DROPOUT), fused=always)) == """\
trace (%x: f32[4, 8]) by=seed_random notes={'random': 'counter'} {
  fw:
    [%seed: i64[][], %seed_1: i64[][]] = jointtrace.seeds.default(2, device('cpu'))  # [random]
    %m: b8[4, 8] = jointtrace.counter_draw.default(%seed, [4, 8], 'bernoulli', p=0.75, dtype=torch.bool, device=device('cpu'))  # [recompute] model.py:7
    %y: f32[4, 8] = aten.native_dropout_backward.default(%x, %m, 1.3333333333333333)  # [recompute] model.py:7
    %r: f32[4, 8] = jointtrace.counter_draw.default(%seed_1, [4, 8], 'uniform', dtype=torch.float32, device=device('cpu'))
  return (%y, %m, %r)
}"""  # noqa: E501


def test_what_nothing_fuses_is_drawn_by_a_generator_and_the_trace_says_so():
    seeded = seed_random(parse(DROPOUT), fused=never)
    assert seeded.notes["random"] == "generator"
    assert {op.target.name for op in seeded.ops if "draw" in op.target.name} == {"jointtrace.generator_draw.default"}


def test_a_generator_takes_its_seed_from_the_host_so_that_no_device_is_waited_for():
    on_device = parse(DROPOUT.replace("f32[4, 8]", "f32[4, 8] cuda").replace("b8[4, 8]", "b8[4, 8] cuda"))
    for fused, device in ((never, "cpu"), (always, "cuda")):
        seeded = seed_random(on_device, fused=fused)
        seeds = seeded.ops[0]
        assert seeds.args == (2, torch.device(device))
        assert {seeded.types[name].device for name in seeds.outs} == {device}
        assert {op.kwargs["device"].type for op in seeded.ops if "draw" in op.target.name} == {"cuda"}


def test_the_text_parses_back():
    seeded = seed_random(parse(DROPOUT), fused=always)
    assert parse(str(seeded)) == seeded


RANDOM_OPS = [  # op, arguments, mean, standard deviation
    (aten.rand.default, ([200_000],), 0.5, math.sqrt(1 / 12)),
    (aten.randn.default, ([200_000],), 0.0, 1.0),
    (aten.rand_like.default, (Var("x"),), 0.5, math.sqrt(1 / 12)),
    (aten.randn_like.default, (Var("x"),), 0.0, 1.0),
    (aten.uniform.default, (Var("x"), -1.0, 3.0), 1.0, 4 * math.sqrt(1 / 12)),
    (aten.normal_functional.default, (Var("x"), 2.0, 3.0), 2.0, 3.0),
    (aten.normal.float_float, (2.0, 3.0, [200_000]), 2.0, 3.0),
    (aten.normal.Tensor_float, (Var("x"), 3.0), 0.3, 3.0),
    (aten.normal.float_Tensor, (2.0, Var("x")), 2.0, 0.3),
    (aten.normal.Tensor_Tensor, (Var("x"), Var("x")), 0.3, 0.3),
    (aten.randint.default, (5, [200_000]), 2.0, math.sqrt(2)),
    (aten.randint.low, (-2, 3, [200_000]), 0.0, math.sqrt(2)),
    (aten.randint_like.default, (Var("x"), 5), 2.0, math.sqrt(2)),
    (aten.randint_like.low_dtype, (Var("x"), 1, 6), 3.0, math.sqrt(2)),
    (aten.bernoulli.default, (Var("x"),), 0.3, math.sqrt(0.21)),
    (aten.bernoulli.p, (Var("x"), 0.9), 0.9, 0.3),
]


@pytest.mark.parametrize("fused", [always, never])
@pytest.mark.parametrize(("overload", "args", "mean", "deviation"), RANDOM_OPS, ids=lambda v: str(v)[:30])
def test_each_random_op_keeps_its_distribution_shape_and_dtype(overload, args, mean, deviation, fused):
    x = torch.full((200_000,), 0.3)
    dtype = torch.int64 if overload in (aten.randint.default, aten.randint.low) else torch.float32
    trace = one(overload, *args, dtype=dtype, inputs={"x": x})
    numbers = draw(trace, [x], fused)
    theirs = overload(*(x if isinstance(arg, Var) else arg for arg in args))
    assert (numbers.dtype, numbers.shape) == (theirs.dtype, theirs.shape)
    for drawn in (numbers.double(), theirs.double()):  # the test itself is tested on torch's own
        error = deviation / math.sqrt(drawn.numel())
        assert abs(drawn.mean().item() - mean) < 5 * error
        assert abs(drawn.std().item() - deviation) < 5 * error
    assert {numbers.min().item(), numbers.max().item()} == {theirs.min().item(), theirs.max().item()} or (
        dtype.is_floating_point and len(numbers.unique()) > 1000)


@pytest.mark.parametrize("op", [
    one(aten.multinomial.default, Var("x"), 4, shape=(4,), dtype=torch.int64, inputs={"x": torch.ones(9)}),
    one(aten.bernoulli.p, Var("x"), 0.5, generator=torch.Generator(), shape=(9,), inputs={"x": torch.ones(9)}),
    parse(NO_DROPOUT),
    one(aten.randn.default, [4], dtype=torch.complex64, shape=(4,)),
    one(aten.rand.default, [4], pin_memory=True, shape=(4,)),
    one(aten.randint.low, -(2**62), 2**62, [4], shape=(4,), dtype=torch.int64),
], ids=["no rule", "own generator", "no dropout", "complex", "pinned", "too wide"])  # fmt: skip
def test_what_has_no_rule_stays_as_it_is(op):
    seeded = seed_random(op, fused=always)
    assert seeded.ops == op.ops
    assert not seeded.notes


def test_what_the_users_executor_claimed_stays_its_own():
    trace = parse(DROPOUT)
    claimed = trace.rebuild([op.replace(tags=op.tags | {Tag.CLAIMED}) for op in trace.ops], by="claimed")
    assert seed_random(claimed, fused=always).ops == claimed.ops


def test_strides_stay_what_the_front_end_was_told():
    x = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    trace = one(aten.rand_like.default, Var("x"), shape=x.shape, inputs={"x": x})
    trace = trace.rebuild(trace.ops, by="", types={"r": TensorType(tuple(x.shape), x.dtype, strides=x.stride())})
    assert draw(trace, [x]).stride() == aten.rand_like(x).stride() == x.stride()


def test_float64_normals_are_drawn_by_a_generator_everywhere():
    seeded = seed_random(one(aten.randn.default, [4], shape=(4,), dtype=torch.float64), fused=always)
    assert seeded.notes["random"] == "generator"


def test_backward_draws_get_seeds_of_their_own():
    trace = parse("""
    trace (%x: f32[3]) {
      fw:
        %y: f32[3] = aten.sin.default(%x)
        %r: f32[3] = aten.rand.default([3])  # [random]
        %z: f32[3] = aten.mul.Tensor(%y, %r)
      bw:
        %n: f32[3] = aten.rand.default([3])  # [random]
        %g: f32[3] = get_grad(%z, 0)  # [get_grad]
        %d: f32[3] = aten.mul.Tensor(%g, %n)
      return (%z) grads (%d)
    }""")
    seeded = seed_random(trace, fused=always)
    verify(seeded, "seed_random")
    assert [op.phase.value for op in seeded.ops if Tag.RANDOM in op.tags] == ["fw", "bw"]


@settings(deadline=None, max_examples=60)
@given(traces())
def test_only_what_was_random_changes(trace):
    for fused in (always, never):
        seeded = seed_random(trace, fused=fused)
        verify(seeded, "seed_random")
        assert not any(Tag.RANDOM in op.tags for op in seeded.ops if "seeds" not in op.target.name)
        assert seeded.outputs == trace.outputs
        assert [op for op in seeded.ops if op in trace.ops] == [op for op in trace.ops if Tag.RANDOM not in op.tags]
        replayed = [run(seeded, sample_inputs(trace), sample_cotangents(trace)) for _ in range(2)]
        torch.testing.assert_close(replayed[0], replayed[1], rtol=0, atol=0, equal_nan=True)


def test_a_draw_left_alone_in_the_backward_equals_the_fused_one():
    trace = parse("""
    trace (%x: f32[33, 5]) {
      fw:
        %r: f32[33, 5] = aten.rand.default([33, 5])  # [random]
        %y: f32[33, 5] = aten.neg.default(%r)
        %z: f32[33, 5] = aten.mul.Tensor(%y, %x)
      bw:
        %g: f32[33, 5] = get_grad(%z, 0)  # [get_grad]
        %c: c64[33, 5] = aten.complex.default(%r, %g)
        %d: f32[33, 5] = aten.real.default(%c)  # [view]
      return (%z) grads (%d)
    }""")
    executors = (TorchCompileExecutor(),)
    halves = pipeline.run(trace, Options(), executors).halves
    assert any(op.target.name == "jointtrace.counter_draw.default" for op in halves.backward.ops)
    assert [op.target.name for op in halves.forward.ops] == ["jointtrace.seeds.default", "torch_compile_0_fw"]
    forward, backward = (compile_trace(link(half, executors, Counters())) for half in (halves.forward, halves.backward))
    z, *kept = forward([torch.ones(33, 5)])
    (d,) = backward([*kept, torch.ones(33, 5)])
    assert torch.equal(d, -z)


# Whole programs

def program(x, w):
    h = F.dropout(x.exp(), 0.4)
    return h, checkpoint(lambda h: F.dropout((h @ w).exp(), 0.3), h, use_reentrant=False)


@functools.cache
def compiled(frontend, executor, disable=(), fn=program):
    options = {"executors": (executor,), "disable": disable}
    if frontend == "thunder":
        return thunder.jit(fn, delay_trace_split=True, jointtrace=options)
    torch._dynamo.reset()
    return torch.compile(fn, backend="jointtrace", options=options)


def leaves(*shape):
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(shape, generator=generator) * 0.1).requires_grad_() for shape in ((16, 8), (8, 8))]


def step(fn, x, w):
    """Outputs, gradients, and whether the backward left the random state alone."""
    h, y = fn(x, w)
    before = torch.get_rng_state()
    grads = torch.autograd.grad(h.sum() + y.sin().sum(), (x, w))
    return (h, y), grads, torch.equal(before, torch.get_rng_state())


@EVERY
def test_the_backward_has_the_masks_of_the_forward(frontend, executor):
    x, w = leaves()
    (h, y), grads, state_kept = step(compiled(frontend, executor), x, w)
    h2 = x.exp() * (h != 0) / 0.6
    expected = torch.autograd.grad(h2.sum() + ((h2 @ w).exp() * (y != 0) / 0.7).sin().sum(), (x, w))
    torch.testing.assert_close(grads, expected)
    assert state_kept, "the backward drew again"


@EVERY
def test_one_seed_gives_one_run_and_two_calls_differ(frontend, executor):
    fn, (x, w) = compiled(frontend, executor), leaves()
    torch.manual_seed(3)
    first, following = step(fn, x, w), step(fn, x, w)
    torch.manual_seed(3)
    again = step(fn, x, w)
    torch.manual_seed(4)
    other = step(fn, x, w)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not torch.equal(first[0][1] != 0, following[0][1] != 0)
    assert not torch.equal(first[0][1] != 0, other[0][1] != 0)


def kept_bytes(fn, *args):
    sizes = {}
    held = {arg.untyped_storage().data_ptr() for arg in args}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = fn(*args)
    held |= {out.untyped_storage().data_ptr() for out in outputs}
    return sum(size for storage, size in sizes.items() if storage not in held)


@pytest.mark.parametrize("frontend", ["thunder", "dynamo"])
def test_of_a_dropout_only_the_seed_is_kept(frontend):
    fn, args = compiled(frontend, "torch_compile"), leaves()
    assert kept_bytes(fn, *args) == 2 * 8
    without = compiled(frontend, "eager", ("seed_random",))
    assert kept_bytes(without, *args) >= 2 * 16 * 8


@pytest.mark.parametrize("frontend", ["thunder", "dynamo"])
def test_switched_off_random_ops_are_saved_as_they_were_drawn(frontend):
    x, w = leaves()
    (h, y), grads, _ = step(compiled(frontend, "eager", ("seed_random",)), x, w)
    h2 = x.exp() * (h != 0) / 0.6
    expected = torch.autograd.grad(h2.sum() + ((h2 @ w).exp() * (y != 0) / 0.7).sin().sum(), (x, w))
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("executor", ["eager", "torch_compile"])
def test_sizes_found_dynamic_draw_right_without_compiling_again(executor):
    def noisy(x):
        return F.dropout(x.exp(), 0.4) * torch.rand_like(x)

    torch._dynamo.reset()
    fn = torch.compile(noisy, backend="jointtrace", dynamic=True, options={"executors": (executor,)})
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for size in (5, 8, 13):
        x = torch.zeros(3, size, requires_grad=True)
        y = fn(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, y)  # as of all that is proportional to exp(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
