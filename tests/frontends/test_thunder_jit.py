"""The thunder front end: `thunder.jit(fn, delay_trace_split=True)` with all that a user hands to thunder.jit."""
from __future__ import annotations

import pytest
import thunder
import torch
import torch.nn.functional as F
from numerics.oracle import assert_like_eager, jit, leaf, plain_sum
from thunder.core.prims import get_grad, put_grad
from thunder.core.trace import from_trace
from thunder.core.transform_common import Transform
from thunder.extend import OperatorExecutor

import jointtrace
from jointtrace.errors import OptionError, UnsupportedError


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.GELU(), torch.nn.Linear(5, 3))


def sine(x):
    return torch.sin(x) * 2


# the compile option


def test_both_orders_of_splitting_give_the_same_numbers_and_keep_the_same_values():
    model, x = mlp(), leaf(6, 4)
    kept, grads = [], []
    for late in (True, False):
        compiled = thunder.jit(model, delay_trace_split=late, jointtrace={"executors": ("torch_compile",)})
        x.grad = None
        compiled(x).sum().backward()
        kept.append([s.name for s in jointtrace.report(compiled).saved])
        grads.append(x.grad)
        names = [stage.name for stage in jointtrace.report(compiled).passes]
        assert (names.index("fuse") < names.index("split_forward")) if late else "fuse" not in names
    assert kept[0] == kept[1]
    torch.testing.assert_close(*grads)


def test_without_the_option_thunder_is_as_it_was():
    compiled = thunder.jit(sine)
    compiled(leaf(3)).sum().backward()
    assert not any("jointtrace" in str(t.get_provenance()) for t in thunder.last_traces(compiled))
    with pytest.raises(OptionError, match="was not compiled by jointtrace"):
        jointtrace.report(compiled)


def test_the_option_is_known_to_thunder():
    compiled = jit(sine)
    compiled(leaf(3))
    assert "delay_trace_split" not in str(thunder.last_compile_options(compiled) or "Unused")


def test_symbolic_values_are_compiled_as_the_constants_they_are():
    def program(x, n):
        return x.reshape(n, -1).mean(0) * n

    with pytest.warns(UserWarning, match='cache="symbolic values" works as "constant values"'):
        compiled = jit(program, cache="symbolic values")
    for x, n in ((leaf(2, 6), 3), (leaf(2, 6), 4), (leaf(5, 4), 2)):
        assert_like_eager(program, x, n, compiled=compiled)


def test_thunders_list_of_executors_stays_its_own():
    assert "jointtrace" not in {executor.name for executor in thunder.get_all_executors()}


@pytest.mark.parametrize(("options", "accepted"), [
    ({"delay_trace_split": "yes"}, "accepted: True, False"),
    ({"delay_trace_split": 1}, "accepted: True, False"),
    ({"delay_trace_split": True, "jointtrace": {"budget": 1}}, "unknown option 'budget'; accepted: executors, disable"),
    ({"delay_trace_split": True, "jointtrace": {"executors": ("fast",)}}, "unknown executor 'fast'; known: .*eager"),
    ({"delay_trace_split": True, "jointtrace": {"executors": 3}}, "accepted: a name or a tuple of names"),
    ({"delay_trace_split": True, "jointtrace": {"disable": ("fusing",)}}, "accepted: group_get_grad, cse, dce"),
    ({"delay_trace_split": True, "jointtrace": "eager"}, "accepted: a dict of options"),
    ({"jointtrace": {}}, "needs delay_trace_split"),
])
def test_a_bad_option_is_refused_where_it_is_given(options, accepted):
    with pytest.raises(OptionError, match=accepted):
        thunder.jit(sine, **options)


def test_an_executor_that_cannot_run_here_is_refused_where_it_is_given():
    if torch.cuda.is_available():
        pytest.skip("nvFuser may run here")
    with pytest.raises(UnsupportedError, match="'nvfuser' is unavailable: nvFuser needs a CUDA device"):
        thunder.jit(sine, delay_trace_split=True, jointtrace={"executors": ("nvfuser",)})


@pytest.mark.parametrize("name", ["group_get_grad", "cse", "dce", "recompute", "fuse"])
def test_each_pass_can_be_left_out(name):
    options = {"executors": ("eager",), "disable": (name,)}
    compiled = assert_like_eager(
        mlp(), leaf(6, 4), compile_fn=lambda fn: thunder.jit(fn, delay_trace_split=True, jointtrace=options))
    assert name not in [stage.name for stage in jointtrace.report(compiled).passes]


# what a user hands to thunder


def test_the_users_operator_executor_claims_before_our_rules():
    executor = OperatorExecutor("of_the_user", version=1)
    calls = []

    def run(a, /, *, approximate="none"):
        calls.append(a.shape)
        return F.gelu(a, approximate=approximate)

    operator = executor.register_operator("their_gelu", like=thunder.torch.gelu, fn=run)
    executor.register_implementation(thunder.torch.gelu, operator)
    compiled = assert_like_eager(mlp(), leaf(6, 4), compile_fn=lambda fn: jit(fn, executors=[executor]))
    assert calls == [(6, 5)]
    assert "of_the_user.their_gelu" in jointtrace.dump(compiled, "forward")


def test_a_transform_before_the_gradient_changes_both_directions():
    class Cosine(Transform):
        def transform_traces_pre_prologue(self, prologue, computation, epilogue, **_):
            changed = from_trace(computation)
            with thunder.core.trace.tracectx(changed):
                changed.bound_symbols = [self.swapped(b) for b in computation.bound_symbols]
            return prologue, changed, epilogue

        def swapped(self, bsym):
            if bsym.sym != thunder.torch.sin:
                return bsym
            return thunder.torch.cos.bind(*bsym.args, output=bsym.output, subsymbols=[
                thunder.core.prims.cos.bind(*bsym.args, output=bsym.output)])

    x = leaf(3)
    out = jit(sine, transforms=[Cosine()])(x)
    out.sum().backward()
    torch.testing.assert_close(out, torch.cos(x) * 2)
    torch.testing.assert_close(x.grad, -2 * torch.sin(x.detach()))


def test_a_transform_after_compilation_sees_and_changes_both_halves():
    class Doubling(Transform):
        def transform_trace_post_optimization(self, trace, **_):
            changed = from_trace(trace)
            changed.bound_symbols = [
                b.from_bsym(args=tuple(4.0 if isinstance(a, float) else a for a in b.args))
                for b in trace.bound_symbols]
            return changed

    x = leaf(3)
    out = jit(sine, transforms=[Doubling()])(x)
    out.sum().backward()
    torch.testing.assert_close(out, torch.sin(x) * 4)
    torch.testing.assert_close(x.grad, torch.cos(x.detach()) * 4)


@pytest.mark.parametrize("executor", ["eager", "torch_compile"])
def test_thunder_checks_every_trace_it_is_asked_to_check(executor):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU(inplace=True))
    debug = thunder.DebugOptions(check_traces=True)
    assert_like_eager(model, leaf(6, 4), compile_fn=lambda fn: jit(fn, executor, debug_options=debug))


def test_autograd_can_be_turned_off():
    out = jit(sine, disable_torch_autograd=True)(leaf(3))
    assert not out.requires_grad


def test_without_a_cache_every_call_compiles():
    compiled = jit(sine, cache="no caching")
    for _ in range(2):
        compiled(leaf(3)).sum().backward()
    assert len(jointtrace.report(compiled).compilations) == 2


# calls


def test_a_new_shape_compiles_again_and_an_old_one_does_not():
    compiled = jit(sine)
    for size in (3, 4, 3, 4):
        x = leaf(size)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, 2 * torch.cos(x.detach()))
    assert (thunder.cache_misses(compiled), thunder.cache_hits(compiled)) == (2, 2)


@pytest.mark.parametrize("executor", ["eager", "torch_compile"])
def test_calls_that_differ_in_strides_alone_are_right(executor):
    def program(x, w):
        return torch.sin(x @ w) * 2 + x.sum()

    compiled = jit(program, executor)
    inputs = (torch.randn(4, 4), torch.randn(4, 4).t(), torch.randn(4, 8)[:, ::2], torch.randn(1, 4).expand(4, 4))
    for x in inputs:
        assert_like_eager(program, x.requires_grad_(), leaf(4, 4), compiled=compiled)
    assert thunder.cache_misses(compiled) == 1


def test_functions_compiled_side_by_side_do_not_mix():
    first, second = jit(sine), jit(lambda x: torch.cos(x) * 3)
    assert_like_eager(sine, leaf(3), compiled=first)
    assert_like_eager(lambda x: torch.cos(x) * 3, leaf(3), compiled=second)
    assert_like_eager(sine, leaf(3), compiled=first)


def test_a_call_under_no_grad_gives_no_graph():
    compiled = jit(mlp())
    with torch.no_grad():
        assert not compiled(torch.randn(6, 4)).requires_grad
    assert compiled(torch.randn(6, 4)).requires_grad


def test_train_and_eval_reach_the_compiled_module():
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5))
    compiled, x = jit(model), torch.randn(8, 4)
    assert (compiled(x) == 0).any()
    compiled.eval()
    torch.testing.assert_close(compiled(x), model(x))
    compiled.train()
    assert (compiled(x) == 0).any()


@pytest.mark.filterwarnings("ignore:torch.get_autocast_:DeprecationWarning")  # thunder asks for them
def test_autocast_around_the_call():
    model, x = mlp(), torch.randn(6, 4)
    compiled, grads = jit(model), []
    for fn in (compiled, model):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = fn(x)
        out.float().square().sum().backward()
        assert out.dtype is torch.bfloat16
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*grads, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("program", [
    lambda x, y: {"a": [x * 2, (y.sin(), 3)], "b": None, "c": "text"},
    lambda x, y: (x, y.sin()),
    lambda x, y: x,
    lambda x, y: (x.view(-1), x[0], y * 2),
    lambda x, y: (x.argmax(), x > 0, y.sin()),
    lambda x, y: (x.shape[0], x * y),
    lambda x, y: (torch.sin(x).t(), torch.ones(2)),
    lambda x, y: x * y.sin() * x,
], ids=["nested", "argument", "argument alone", "views of an argument", "integers", "number", "view", "reuse"])
def test_outputs_of_every_kind(program):
    assert_like_eager(program, leaf(3, 2), leaf(3, 2))


def test_outputs_that_share_memory_share_it():
    y, flat, turned = jit(lambda x: (lambda y: (y, y.view(-1), y.t()))(torch.sin(x)))(leaf(3, 2))
    assert y.data_ptr() == flat.data_ptr() == turned.data_ptr()


@pytest.mark.parametrize("args", [
    (leaf(3, 4).detach().t().requires_grad_(), leaf(4, 3)),
    (torch.randn(1, 3).expand(4, 3), leaf(4, 3)),
    (leaf(0, 3), leaf(0, 3)),
    (leaf(), leaf(3)),
    (leaf(3), 2.5),
    (leaf(3), torch.arange(3)),
], ids=["not contiguous", "expanded", "empty", "scalar", "number", "integers"])
def test_arguments_of_every_kind(args):
    assert_like_eager(lambda x, y: torch.sin(x) * y, *args)


def test_arguments_in_containers_and_by_keyword():
    assert_like_eager(lambda xs, *, scale: xs[0] * xs[1]["k"] * scale, [leaf(3), {"k": leaf(3)}], scale=leaf(3))


def test_one_tensor_in_two_places():
    x = leaf(3)
    assert_like_eager(lambda a, b: a * torch.sin(b), x, x)


def test_frozen_parameters_get_no_gradient():
    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base = torch.nn.Linear(4, 4).requires_grad_(False)
            self.down, self.up = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 4, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    assert_like_eager(Adapted(), torch.randn(2, 4))
    assert_like_eager(torch.nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4))


def test_a_buffer_counts_calls():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x):
            self.calls += 1
            return self.linear(x) * self.calls

    assert_like_eager(Counting(), leaf(2, 3), calls=3)


@pytest.mark.parametrize("nested", [False, True], ids=["of the root", "of a child"])
def test_a_buffer_that_is_replaced_has_its_new_value_at_the_next_call(nested):
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return x * self.calls

    compiled = jit(torch.nn.Sequential(Counting()) if nested else Counting())
    assert [compiled(torch.ones(())).item() for _ in range(3)] == [1, 2, 3]
    assert compiled.state_dict()["0.calls" if nested else "calls"] == 3


# backward


@pytest.mark.parametrize("executor", ["eager", "torch_compile"])
@pytest.mark.parametrize("loss", [
    plain_sum,
    lambda out: (out.t() * torch.arange(15.0).view(5, 3)).sum(),
    lambda out: (out * torch.tensor(2.0).expand(3, 5)).sum(),
], ids=["stride 0", "transposed", "expanded"])
def test_cotangents_of_every_layout(loss, executor):
    assert_like_eager(lambda x, w: torch.sin(x @ w), leaf(3, 4), leaf(4, 5), loss=loss,
                      compile_fn=lambda fn: jit(fn, executor))


def test_a_retained_graph_runs_twice_and_a_freed_one_raises():
    x = leaf(3)
    out = jit(sine)(x)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    torch.testing.assert_close(x.grad, 4 * torch.cos(x.detach()))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_a_second_derivative_raises():
    x = leaf(3)
    (grad,) = torch.autograd.grad(jit(sine)(x).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        grad.sum().backward()


def test_arguments_that_do_not_reach_the_output_get_none():
    assert_like_eager(lambda x, y: torch.sin(y), leaf(3), torch.randn(3))
    assert_like_eager(lambda x, y: torch.sin(y), leaf(3), leaf(3))


def test_a_gradient_rule_with_too_few_results_is_refused_in_thunders_words():
    executor = OperatorExecutor("of_two_results", version=1)
    meta = lambda x: (thunder.TensorProxy(like=x), thunder.TensorProxy(like=x))  # noqa: E731
    operator = executor.register_operator("two_results", meta=meta, fn=lambda x: (x + 0, x + 1))

    def rule(x):
        first, _ = operator(x)
        put_grad(x, get_grad(first))
        return first

    executor.register_implementation(operator, operator, grad_transform=rule)
    with pytest.raises(UnsupportedError, match=r"has 2 results, .* returns 1. The number of outputs of the gradient"):
        jit(lambda x: operator(x), executors=[executor])(leaf(2))


def test_a_result_shows_that_thunder_compiled_it():
    assert jit(sine)(leaf(2)).grad_fn.name() == "ThunderFunctionBackward"
