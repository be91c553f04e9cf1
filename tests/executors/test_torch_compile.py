"""Regions through Inductor, against the same ops run eagerly: values, strides and shared memory."""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jointtrace.errors import UnsupportedError
from jointtrace.executors.eager import EagerExecutor
from jointtrace.executors.torch_compile import InductorRegion, TorchCompileExecutor
from jointtrace.ir.op import ObjectType, Op, Phase, ScalarType, Source, Symbol, Tag, Target, TensorType, Var
from jointtrace.ir.trace import Trace
from jointtrace.runtime.codegen import compile_trace

aten = torch.ops.aten
EXECUTOR = TorchCompileExecutor()
pytestmark = pytest.mark.skipif(EXECUTOR.unavailable() is not None, reason=str(EXECUTOR.unavailable()))


def op(fn: Callable, *args: Any, out: Any, **kwargs: Any) -> Op:
    return Op(Target(getattr(fn, "__name__", str(fn)), fn), args, kwargs, Var(out) if isinstance(out, str) else out)


def type_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorType(tuple(value.shape), value.dtype, str(value.device))
    return ScalarType(type(value).__name__)


def region(ops: Sequence[Op], inputs: dict[str, Any], outputs: Sequence[str], phase: Phase = Phase.FW) -> Op:
    """A region over `ops`; types of the inputs are those of the values given."""
    out = tuple(map(Var, outputs))
    body = Trace(tuple(inputs), ops, out, types={name: type_of(value) for name, value in inputs.items()})
    return Op(Target("torch_compile_0_fw"), tuple(map(Var, inputs)), out=out, phase=phase, body=body)


@torch.no_grad()
def compare(ops: Sequence[Op], inputs: dict[str, Any], outputs: Sequence[str], **tolerance: float) -> InductorRegion:
    """Run `ops` eagerly and compiled; values, dtypes, strides and which results share memory must be equal."""
    it = region(ops, inputs, outputs)
    compiled = EXECUTOR.compile(it)
    values = list(inputs.values())
    expected, actual = EagerExecutor().compile(it)(*values), compiled(*values)
    assert isinstance(actual, tuple)
    torch.testing.assert_close(actual, expected, **tolerance)
    assert layouts(actual) == layouts(expected)
    assert sharing([*actual, *values]) == sharing([*expected, *values])
    return compiled


def layouts(values: Sequence[Any]) -> list[Any]:
    return [(v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else type(v) for v in values]


def sharing(values: Sequence[Any]) -> list[int]:
    owners = [
        v.untyped_storage().data_ptr() if isinstance(v, torch.Tensor) and v.numel() else object() for v in values
    ]
    return [owners.index(owner) for owner in owners]


SIN_MUL = (op(torch.sin, Var("x"), out="a"), op(torch.mul, Var("a"), Var("w"), out="y"))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def test_values_equal_eager():
    compare(SIN_MUL, {"x": rand(4, 8), "w": rand(4, 8)}, ["y", "a"])


def test_a_matrix_product_with_a_softmax_equals_eager():
    ops = [
        op(torch.nn.functional.linear, Var("x"), Var("w"), out="a"), op(torch.softmax, Var("a"), -1, out="b"),
        op(torch.sum, Var("b"), 0, dtype=torch.float64, out="y"),
    ]
    compare(ops, {"x": rand(4, 8), "w": rand(5, 8)}, ["y", "b"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arrange", [
    lambda t: t.t().contiguous().t(), lambda t: torch.stack([t, t], -1)[..., 0], lambda t: t[0].expand(4, 8),
    lambda t: t.flip(0)[::2].repeat_interleave(2, 0),
], ids=["transposed", "gaps", "stride 0", "contiguous"])
def test_any_input_strides_work(arrange):
    compare(SIN_MUL, {"x": arrange(rand(4, 8)), "w": rand(4, 8)}, ["y", "a"])


def test_new_strides_compile_again_and_known_ones_do_not():
    x, w = rand(4, 8), rand(4, 8)
    compiled = compare(SIN_MUL, {"x": x, "w": w}, ["y"])
    before = len(compiled.variants)
    turned = x.t().contiguous().t()
    for _ in range(2):
        torch.testing.assert_close(compiled(turned, w), (torch.sin(turned) * w,))
        torch.testing.assert_close(compiled(x, w), (torch.sin(x) * w,))
    assert len(compiled.variants) == before + 1


def test_permuted_results_have_the_strides_of_eager():
    ops = [
        op(torch.sin, Var("x"), out="a"), op(torch.permute, Var("a"), (2, 0, 1), out="b"),
        op(torch.exp, Var("b"), out="c"), op(torch.mul, Var("c"), 2.0, out="d"),
        op(torch.transpose, Var("d"), 0, 1, out="e"),
    ]
    compare(ops, {"x": rand(2, 3, 4)}, ["b", "c", "e"])


def test_a_convolution_on_channels_last_has_the_strides_of_eager():
    ops = [
        op(torch.nn.functional.conv2d, Var("x"), Var("w"), padding=1, out="a"), op(torch.relu, Var("a"), out="y"),
        op(torch.nn.functional.max_pool2d, Var("y"), 2, out="z"),
    ]
    for x in (rand(2, 3, 8, 8), rand(2, 3, 8, 8).to(memory_format=torch.channels_last)):
        compare(ops, {"x": x, "w": rand(4, 3, 3, 3)}, ["a", "y", "z"], rtol=1e-4, atol=1e-5)


def test_a_result_that_is_a_view_of_an_input_shares_its_memory():
    ops = [
        op(torch.transpose, Var("x"), 0, 1, out="v"), op(torch.sin, Var("v"), out="a"), op(torch.neg, Var("a"), out="y")
    ]
    compare(ops, {"x": rand(4, 8)}, ["v", "y"])


def test_a_result_that_is_an_input_shares_its_memory():
    ops = [op(torch.Tensor.contiguous, Var("x"), out="v"), *SIN_MUL]
    compare(ops, {"x": rand(4, 8), "w": rand(4, 8)}, ["v", "y"])


def test_a_region_without_any_work_left_works():
    ops = [op(torch.Tensor.contiguous, Var("x"), out="a"), op(torch.Tensor.contiguous, Var("a"), out="y")]
    compiled = compare(ops, {"x": rand(4, 8)}, ["a", "y"])
    args = [rand(4, 8)]
    compiled.boxed(args)
    assert args == []


def test_results_that_share_memory_in_eager_do_so_compiled():
    ops = [
        op(torch.sin, Var("x"), out="a"), op(torch.neg, Var("a"), out="b"), op(torch.Tensor.view, Var("b"), -1, out="v")
    ]
    compare(ops, {"x": rand(4, 8)}, ["b", "v"])


@pytest.mark.parametrize("fn", [torch.clone, lambda t: t * 1, lambda t: t + 0], ids=["clone", "times one", "plus zero"])
def test_a_copy_shares_no_memory_with_its_source(fn):
    ops = [op(torch.sin, Var("x"), out="a"), op(fn, Var("a"), out="b"), op(fn, Var("x"), out="c")]
    compare(ops, {"x": rand(4, 8)}, ["a", "b", "c"])


def test_one_tensor_given_twice_works():
    x = rand(4, 8)
    compare(SIN_MUL, {"x": x, "w": x}, ["y"])


def test_inputs_that_overlap_work():
    x = rand(5, 8)
    compare(SIN_MUL, {"x": x[:4], "w": x[1:]}, ["y"])


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1)], ids=str)
def test_shapes_at_the_edge_work(shape):
    compare(SIN_MUL, {"x": torch.randn(shape), "w": torch.randn(shape)}, ["y", "a"])


def test_integers_and_booleans_work():
    ops = [
        op(torch.add, Var("x"), 3, out="a"), op(torch.gt, Var("a"), Var("w"), out="b"),
        op(torch.where, Var("b"), Var("a"), Var("w"), out="c"), op(torch.logical_not, Var("b"), out="d"),
    ]
    compare(ops, {"x": torch.arange(6), "w": torch.arange(6).flip(0)}, ["a", "b", "c", "d"])


def test_half_precision_works():
    x, w = rand(4, 8).bfloat16(), rand(4, 8).bfloat16()
    compare(SIN_MUL, {"x": x, "w": w}, ["y"], rtol=2e-2, atol=2e-2)


def test_a_number_among_the_inputs_may_change():
    ops = [op(torch.mul, Var("x"), Var("n"), out="a"), op(torch.sin, Var("a"), out="y")]
    for n in (2, 3, 2, 0.5, True):
        compare(ops, {"x": rand(4), "n": n}, ["y"])


def test_two_numbers_that_are_equal_but_of_other_types_stay_apart():
    ops = [op(torch.mul, Var("x"), Var("n"), out="a"), op(torch.add, Var("a"), Var("n"), out="y")]
    it = region(ops, {"x": torch.arange(3), "n": 1}, ["y"])
    compiled = EXECUTOR.compile(it)
    assert [compiled(torch.arange(3), n)[0].dtype for n in (1, 1.0)] == [torch.int64, torch.float32]


def test_a_size_that_is_not_fixed_may_change():
    body = Trace(("x", "w"), SIN_MUL, (Var("y"),), types={
        name: TensorType((Symbol("s0", 4), 8), torch.float32) for name in ("x", "w")
    })
    compiled = EXECUTOR.compile(Op(Target("torch_compile_0_fw"), (Var("x"), Var("w")), out=(Var("y"),), body=body))
    for size in (4, 5, 4):
        x, w = rand(size, 8), rand(size, 8)
        torch.testing.assert_close(compiled(x, w), (torch.sin(x) * w,))


def test_results_that_are_no_values_are_passed_over():
    ops = [
        op(torch.native_layer_norm, Var("x"), [8], None, None, 1e-5, out=(Var("a"), None, Var("r"))),
        op(torch.mul, Var("a"), Var("r"), out="y"),
    ]
    compare(ops, {"x": rand(4, 8)}, ["y", "r"], rtol=1e-5, atol=1e-5)


def test_an_implementation_that_writes_to_its_own_temporaries_works():
    def implementation(x):
        out = torch.zeros_like(x)
        out[0].add_(x[1])
        return out.mul_(2)

    compare([op(implementation, Var("x"), out="a"), op(torch.sin, Var("a"), out="y")], {"x": rand(4, 8)}, ["a", "y"])


def test_a_result_made_of_no_input_works():
    ops = [op(torch.ones, 3, 4, out="a"), op(torch.add, Var("a"), 1, out="y"), op(torch.sin, Var("x"), out="z")]
    compare(ops, {"x": rand(2)}, ["y", "z"])


def test_random_ops_draw_anew_at_each_call_and_obey_the_seed():
    ops = [op(torch.rand_like, Var("x"), out="a"), op(torch.add, Var("a"), Var("x"), out="y")]
    x = torch.zeros(1000)
    compiled = EXECUTOR.compile(region(ops, {"x": x}, ["y"]))
    torch.manual_seed(1)
    (first,), (second,) = compiled(x), compiled(x)
    torch.manual_seed(1)
    (again,) = compiled(x)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    assert 0.45 < first.mean() < 0.55


def test_compiling_draws_no_random_number():
    ops = [op(torch.rand_like, Var("x"), out="a"), op(torch.sub, Var("a"), Var("x"), out="y")]
    it = EXECUTOR.compile(region(ops, {"x": rand(7)}, ["y"]))
    x = torch.zeros(7)
    torch.manual_seed(1)
    cold = it(x)
    torch.manual_seed(1)
    torch.testing.assert_close(it(x), cold, rtol=0, atol=0)


def test_what_the_user_has_on_does_not_reach_the_code():
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def implementation(x, w):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return torch.cos(torch.mm(x, w))

    ops = [op(implementation, Var("x"), Var("w"), out="a"), op(torch.sin, Var("a"), out="y")]
    x, w = rand(4, 4), rand(4, 4)
    compiled = EXECUTOR.compile(region(ops, {"x": x, "w": w}, ["y"]))
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad(), Spy():
        compiled._compile(compiled.key([x, w]), [x, w])
    assert (False, False) in seen
    assert not {(True, False), (False, True), (True, True), aten.cos.default} & set(seen)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, w), (torch.sin(torch.cos(x @ w)),))


def test_parameters_and_inputs_that_require_grad_work():
    w = torch.nn.Parameter(rand(4, 4))
    ops = [op(torch.mm, Var("x"), Var("w"), out="a"), op(torch.cos, Var("a"), out="y")]
    it = EXECUTOR.compile(region(ops, {"x": rand(4, 4), "w": w}, ["y"]))
    with torch.no_grad():
        (y,) = it(rand(4, 4), w)
    assert not y.requires_grad


def test_an_input_dies_while_the_region_still_runs():
    alive = []

    @torch.library.custom_op("jointtrace_test::look", mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append(ref() is not None)
        return x + 1

    look.register_fake(torch.empty_like)
    ops = [
        op(torch.sin, Var("x"), out="a"), op(torch.ops.jointtrace_test.look, Var("a"), out="b"),
        op(torch.cos, Var("b"), out="y"),
    ]
    compiled = EXECUTOR.compile(region(ops, {"x": rand(4)}, ["y"]))
    for _ in range(2):
        args = [rand(4)]
        ref = weakref.ref(args[0])
        compiled.boxed(args)
        assert args == []
    assert alive == [False, False]


def test_a_region_in_generated_code_is_given_its_arguments_to_free():
    inputs = {"x": rand(4, 8), "w": rand(4, 8)}
    it = region(SIN_MUL, inputs, ["y"])
    compiled = EXECUTOR.compile(it)
    trace = Trace(("x", "w"), (it.replace(target=Target("torch_compile_0_fw", compiled)),), (Var("y"),))
    torch.testing.assert_close(compile_trace(trace)(list(inputs.values())), (torch.sin(inputs["x"]) * inputs["w"],))


def test_a_failure_names_the_region_its_ops_and_the_cause():
    def broken(x):
        raise RuntimeError("no such luck")

    ops = [op(torch.sin, Var("x"), out="a"), op(broken, Var("a"), out="y").replace(source=Source("model.py", 7))]
    compiled = EXECUTOR.compile(region(ops, {"x": rand(3)}, ["y"]))
    with pytest.raises(UnsupportedError, match=r"torch_compile_0_fw.*sin, broken \(model.py:7\).*no such luck") as info:
        compiled(rand(3))
    assert isinstance(info.value.__cause__, RuntimeError)


def test_threads_that_call_a_new_region_together_compile_it_once():
    traced = []

    def implementation(x):
        traced.append(None)
        return torch.sin(x)

    def run(threads: int, x: torch.Tensor) -> int:
        """Return how often the implementation was traced for that many calls at once."""
        ops = [op(implementation, Var("x"), out="a"), op(torch.neg, Var("a"), out="y")]
        compiled = EXECUTOR.compile(region(ops, {"x": x}, ["y"], Phase.BW))
        workers = [threading.Thread(target=compiled, args=(x,)) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        count = len(traced)
        traced.clear()
        torch.testing.assert_close(compiled(x), (-torch.sin(x),))
        return count

    assert run(4, rand(3, 7)) == run(1, rand(3, 8)) > 0


FLOAT = TensorType((2,), torch.float32)
SINE = op(torch.sin, Var("x"), out="y")


@pytest.mark.parametrize(("claimed", "it", "types"), [
    (True, SINE, {"x": FLOAT, "y": FLOAT}),
    (True, op(torch.mul, Var("x"), Var("n"), out="y"), {"x": FLOAT, "n": ScalarType("float"), "y": FLOAT}),
    (False, SINE.replace(target=Target("sin")), {"x": FLOAT, "y": FLOAT}),
    (False, SINE, {"x": FLOAT, "y": ScalarType("float")}),
    (False, SINE, {"x": ObjectType(), "y": FLOAT}),
    (False, SINE, {"y": FLOAT}),
    (False, SINE, {"x": TensorType((2,), torch.complex64), "y": FLOAT}),
    (False, SINE, {"x": TensorType((2,), torch.float32, "meta"), "y": FLOAT}),
    (False, op(torch.mul, Var("x"), torch.ones(2), out="y"), {"x": FLOAT, "y": FLOAT}),
    (False, SINE.replace(body=Trace((), (), ())), {"x": FLOAT, "y": FLOAT}),
    *[(False, SINE.replace(tags=frozenset({tag})), {"x": FLOAT, "y": FLOAT})
      for tag in (Tag.COLLECTIVE, Tag.WAIT, Tag.GET_GRAD, Tag.CLAIMED, Tag.OPAQUE)],
])
def test_it_claims_pure_ops_on_tensors_and_numbers(claimed, it, types):
    assert EXECUTOR.can_run(it, types) is claimed


def test_without_a_compiler_it_says_what_to_install(python):
    done = python(
        "import os; os.environ['CXX'] = '/nowhere/g++'; os.environ['PATH'] = '/nowhere'\n"
        "from jointtrace.executors.torch_compile import TorchCompileExecutor\n"
        "print(TorchCompileExecutor().unavailable())"
    )
    assert "no C++ compiler; install one" in done.stdout


@pytest.mark.parametrize("outputs", [["v", "b"], ["b", "v"], ["v", "b", "c"], ["a", "v"], ["b", "s"]], ids=str)
def test_copies_of_one_value_stay_apart(outputs):
    # Inductor alone returns one memory for `v` and `b`: it takes away both copies of what is no output itself
    ops = (
        op(torch.add, Var("x"), 1.5, out="a"), op(torch.clone, Var("a"), out="v"), op(torch.clone, Var("v"), out="b"),
        op(torch.clone, Var("a"), out="c"), op(torch.sin, Var("v"), out="s"))
    compare(ops, {"x": rand(3, 4)}, outputs)
    compare(ops, {"x": rand(4, 3).t()}, outputs)


def test_an_alias_of_an_input_is_a_tensor_of_its_own():
    ops = (op(torch.detach, Var("x"), out="d"), op(torch.sin, Var("d"), out="s"), op(torch.cos, Var("s"), out="c"))
    x = rand(3).requires_grad_()
    compiled = EXECUTOR.compile(region(ops, {"x": x}, ["d", "c"]))
    with torch.no_grad():
        alias, _ = compiled(x)
    assert alias is not x
    assert alias.data_ptr() == x.data_ptr()
    assert not alias.requires_grad
