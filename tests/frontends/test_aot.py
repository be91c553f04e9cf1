"""The torch.compile front end: `torch.compile(model, backend="jointtrace")` with all that a user puts around it."""
from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from numerics.oracle import assert_like_eager, compile_below_aot, leaf, plain_sum
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from jointtrace.errors import OptionError, UnsupportedError

like_eager = functools.partial(assert_like_eager, compile_fn=compile_below_aot)
both_executors = pytest.mark.parametrize("executor", ["eager", "torch_compile"])


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    dynamo.reset()


def with_executor(executor):
    return lambda fn: compile_below_aot(fn, executor)


def mlp(size=4):
    return torch.nn.Sequential(torch.nn.Linear(size, 5), torch.nn.GELU(), torch.nn.Linear(5, size))


def gradients(fn, model, x):
    """Return the gradients of the sum of `fn(x)` for `x` and the parameters of `model`."""
    return torch.autograd.grad(fn(x).float().sum(), (x, *model.parameters()))


class Kept:
    """Counts what is saved for the backward while it is entered."""

    def __enter__(self):
        self.tensors = []
        self.hooks = saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self.tensors

    def pack(self, tensor):
        self.tensors.append(tensor)
        return tensor.detach()  # of a result, with its history, would keep itself alive

    def __exit__(self, *error):
        self.hooks.__exit__(*error)


# options


@pytest.mark.parametrize(("given", "accepted"), [
    ({"options": {"budget": 1}}, "unknown option 'budget'; accepted: executors, disable"),
    ({"options": {"executors": 3}}, "accepted: a name or a tuple of names"),
    ({"options": {"executors": "fast"}}, "unknown executor 'fast'; known: .*eager"),
    ({"options": {"late_split": True}}, "unknown option 'late_split'"),
    ({"mode": "reduce-overhead"}, "mode='reduce-overhead'; accepted: default, max-autotune-no-cudagraphs"),
])
def test_a_bad_option_is_refused_when_the_function_is_first_called(given, accepted):
    with pytest.raises(dynamo.exc.BackendCompilerFailed, match=accepted) as caught:
        torch.compile(torch.sin, backend="jointtrace", **given)(leaf(3))
    assert isinstance(caught.value.inner_exception, OptionError)


def test_a_mode_reaches_inductor(monkeypatch):
    from torch._inductor import config

    from jointtrace.executors import torch_compile

    seen, compile_graph = [], torch_compile.compile_graph

    def noting(*args, **kwargs):
        seen.append(config.max_autotune)
        return compile_graph(*args, **kwargs)

    monkeypatch.setattr(torch_compile, "compile_graph", noting)
    for mode in ("max-autotune-no-cudagraphs", None):
        dynamo.reset()
        compiled = torch.compile(lambda x: torch.sin(x) * 5, backend="jointtrace", mode=mode)
        with torch.no_grad():
            compiled(torch.randn(3))
    assert seen == [True, False]


@both_executors
def test_a_trace_says_which_operators_were_decomposed_before_it(executor):
    from jointtrace.frontends import aot
    from jointtrace.options import Options

    session = aot.Session(Options(executors=(executor,)))
    dynamo.reset()
    torch.compile(mlp(), backend=session.compile)(leaf(2, 4)).sum().backward()
    notes = {stage.trace.notes["decompositions"] for stage in session.record.stages}
    assert notes == {"none" if executor == "eager" else "Inductor's"}
    names = {op.target.name for op in session.record.stages[0].trace.ops}
    assert ("aten.gelu.default" in names) == (executor == "eager")


@pytest.mark.parametrize("name", ["group_get_grad", "cse", "dce", "recompute", "fuse"])
def test_each_pass_can_be_left_out(name):
    compile_fn = functools.partial(compile_below_aot, disable=(name,))
    assert_like_eager(mlp(), leaf(6, 4), compile_fn=compile_fn)


# what Dynamo does with a program


def test_a_graph_break_gives_two_graphs_and_the_right_gradient():
    def broken(x):
        y = torch.sin(x)
        dynamo.graph_break()
        return torch.cos(y) * x

    like_eager(broken, leaf(4))
    dynamo.reset()  # else the two graphs would be found again
    with pytest.raises(dynamo.exc.Unsupported):
        compile_below_aot(broken, fullgraph=True)(leaf(4))


def test_other_sizes_compile_again():
    compiled = compile_below_aot(lambda x: torch.sin(x) * 2)
    for size in (3, 4, 5):
        like_eager(lambda x: torch.sin(x) * 2, leaf(size), compiled=compiled)


def test_functions_and_submodules_compiled_apart_run_in_one_program():
    model, head = mlp(), torch.nn.Linear(4, 2)
    whole = torch.nn.Sequential(model, head)
    x = leaf(3, 4)
    expected = gradients(whole, whole, x)
    model.compile(backend="jointtrace", options={"executors": ("eager",)})
    scaled = compile_below_aot(lambda y: head(y) * 1)
    torch.testing.assert_close(gradients(lambda x: scaled(model(x)), whole, x), expected)


def test_it_can_be_reset():
    compiled = compile_below_aot(torch.sin)
    compiled(leaf(3))
    dynamo.reset()
    like_eager(torch.sin, leaf(3), compiled=compiled)


def test_two_threads_compile_and_run_one_model():
    model = mlp()
    compiled = compile_below_aot(model)
    errors = []

    def train():
        try:
            for size in (3, 4, 3):
                x = leaf(size, 4)
                torch.testing.assert_close(gradients(compiled, model, x), gradients(model, model, x))
        except BaseException as error:  # noqa: BLE001  a thread's error would be lost
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_fake_tensors_run_through_it():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(2, 4))
        assert compile_below_aot(mlp())(x).shape == (2, 4)


# modes around it and in it


def test_without_gradients_nothing_is_kept():
    model, x = mlp(), torch.randn(2, 4)
    compiled = compile_below_aot(model)
    with torch.no_grad():
        assert not compiled(x).requires_grad
    with torch.inference_mode():
        assert compiled(x).is_inference()
    assert compiled(x).requires_grad


def test_autocast_in_the_function_and_around_it():
    model, x = mlp(), leaf(3, 4)

    def casting(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    expected = gradients(casting, model, x)
    assert compile_below_aot(casting)(x).dtype == torch.bfloat16
    torch.testing.assert_close(gradients(compile_below_aot(casting), model, x), expected, rtol=2e-2, atol=2e-2)
    compiled = compile_below_aot(model)
    with torch.autocast("cpu", torch.bfloat16):
        y = compiled(x)
    assert y.dtype == torch.bfloat16
    found = torch.autograd.grad(y.float().sum(), (x, *model.parameters()))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_regions_without_gradients_or_with_autocast_in_the_function():
    def mixed(x):
        with torch.no_grad():
            y = torch.sin(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = (x @ x).float()
        return y * torch.cos(x) + z

    like_eager(mixed, leaf(4, 4), rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in CompiledFunction")
def test_anomaly_mode_names_the_compiled_backward():
    with torch.autograd.detect_anomaly(check_nan=True):
        like_eager(lambda x: torch.sin(x).exp(), leaf(4))
        y = compile_below_aot(lambda x: (x * 0).sqrt() * 0)(torch.zeros(3, requires_grad=True))
        with pytest.raises(RuntimeError, match="'CompiledFunctionBackward' returned nan"):
            y.sum().backward()


# checkpoints


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_compiled_block_in_an_eager_checkpoint_draws_its_dropout_again(reentrant):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 16))
    compiled, x, found = compile_below_aot(model), leaf(8, 16), []
    for run in (compiled, lambda x: checkpoint(compiled, x, use_reentrant=reentrant)):
        model.zero_grad()
        x.grad = None
        torch.manual_seed(3)
        y = run(x)
        y.sum().backward()
        found.append([y, x.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found)


@both_executors
def test_a_chain_of_checkpoints_keeps_what_stands_between_them(executor):
    def chain(x, w):
        for _ in range(5):
            x = checkpoint(lambda x: torch.sin(x @ w).cos(), x, use_reentrant=False)
        return x.exp()

    compile_fn = with_executor(executor)
    assert_like_eager(chain, leaf(4, 4), leaf(4, 4), compile_fn=compile_fn)
    with Kept() as kept:
        compile_fn(chain)(leaf(4, 4), leaf(4, 4))
    assert len(kept) == 7  # x, w, what four checkpoints hand on, and the result


@both_executors
def test_a_selective_checkpoint_saves_what_its_policy_says(executor):
    def policy(ctx, operator, *args, **kwargs):
        saved = operator is torch.ops.aten.sin.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def block(x, w):
        return checkpoint(lambda x: torch.sin(x @ w).exp() @ w, x, use_reentrant=False, context_fn=contexts)

    compile_fn = with_executor(executor)
    x, w = leaf(4, 4), leaf(4, 4)
    assert_like_eager(block, x, w, compile_fn=compile_fn)
    with Kept() as kept:
        compile_fn(block)(x, w)
    assert sum(bool(torch.allclose(tensor, torch.sin(x @ w))) for tensor in kept) == 1
    assert len(kept) == 3


# objects


def test_a_module_copies_saves_and_pickles_before_and_after():
    model = mlp()
    twin = copy.deepcopy(model)
    compiled, other = compile_below_aot(model), compile_below_aot(twin)
    x = leaf(2, 4)
    torch.testing.assert_close(gradients(compiled, model, x), gradients(other, twin, x))
    again = copy.deepcopy(compiled)
    torch.testing.assert_close(again(x), compiled(x))
    compiled.load_state_dict(other.state_dict())
    torch.save(model, io.BytesIO())
    model.compile(backend="jointtrace")
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), twin(x))


def test_a_deleted_model_is_freed_without_the_cyclic_collector():
    model = mlp()
    compiled = compile_below_aot(model)
    compiled(leaf(2, 4)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        watched = [weakref.ref(model), weakref.ref(model[0].weight)]
        del model, compiled
        assert [watch() for watch in watched] == [None, None]
    finally:
        gc.enable()


def test_what_is_kept_is_freed_by_the_backward_and_with_the_result():
    compiled = compile_below_aot(lambda x: torch.sin(torch.sin(x)).exp())
    compiled(leaf(4)).sum().backward()
    for end in (lambda y: y.sum().backward(), lambda y: None):
        gc.collect()
        gc.disable()
        try:
            with Kept() as kept:
                y = compiled(leaf(4))
            watched = [weakref.ref(tensor.untyped_storage()) for tensor in kept]
            assert watched
            del kept[:]
            end(y)
            del y
            assert [watch() for watch in watched] == [None] * len(watched)
        finally:
            gc.enable()


def test_hooks_of_modules_parameters_and_results_run():
    model, log = mlp(), []
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model.register_full_backward_hook(lambda module, ins, outs: log.append("module"))
    model[0].weight.register_hook(lambda grad: (log.append("tensor"), grad * 3)[1])
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: log.append("accumulated"))
    compiled, found = compile_below_aot(model), []
    for fn in (model, compiled):
        model.zero_grad()
        log.clear()
        fn(leaf(2, 4) * 0 + 1).sum().backward()
        found.append((model[0].weight.grad.clone(), sorted(log)))
    assert found[0][1] == found[1][1] == ["accumulated", "module", "tensor"]
    torch.testing.assert_close(found[0][0], found[1][0])


def test_a_hook_registered_in_the_function_runs():
    def hooked(x):
        y = torch.sin(x)
        y.register_hook(lambda grad: grad * 2)
        return y.exp()

    like_eager(hooked, leaf(4))


# autograd around it


def test_saved_tensors_can_be_packed_and_offloaded():
    with Kept() as kept:
        like_eager(lambda x: torch.sin(torch.sin(x)).exp(), leaf(4))
    assert kept
    with save_on_cpu():
        like_eager(lambda x: torch.sin(torch.sin(x)).exp(), leaf(4))


def test_a_backward_runs_twice_where_the_graph_is_retained():
    x = leaf(4)
    y = compile_below_aot(lambda x: (x.sin() * 2).exp().sin().exp())(x).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_a_second_derivative_is_refused():
    x = leaf(4)
    grad, = torch.autograd.grad(compile_below_aot(lambda x: torch.sin(x).exp())(x).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        grad.sum().backward()


def test_compiled_autograd_runs_its_backward():
    model, x = mlp(), leaf(2, 4)
    compiled = compile_below_aot(model)
    expected = gradients(model, model, x)
    with dynamo.compiled_autograd._enable(torch.compile(backend="jointtrace", options={"executors": ("eager",)})):
        compiled(x).sum().backward()
    torch.testing.assert_close((x.grad, *(p.grad for p in model.parameters())), expected)


# what goes in and comes out


def test_a_cotangent_of_another_layout():
    like_eager(lambda x: torch.sin(x) * x.t(), leaf(4, 4), loss=plain_sum)


def test_views_of_arguments_and_of_results_are_results():
    like_eager(lambda x: (x.view(-1), x.t(), torch.sin(x).t(), x), leaf(3, 4))


def test_arguments_that_share_memory_are_written_to():
    def bump(u, v):
        u.add_(1)
        return v * 2

    base = torch.randn(6)
    like_eager(bump, base[:4], base[2:])
    like_eager(bump, base, base)


@both_executors
def test_a_value_of_an_argument_from_before_it_is_overwritten_is_kept(executor):
    def counted(x, counter):
        y = x * (counter * 2).sin()
        counter.add_(1)
        return y

    assert_like_eager(counted, leaf(4), torch.randn(4), compile_fn=with_executor(executor))


@both_executors
def test_an_argument_with_a_gradient_is_overwritten(executor):
    def scaled(x, w):
        x.mul_(w)
        return x.sum()

    def outer(fn, x, w):
        y = x * 1
        return fn(y, w) + y.sum()

    compiled = compile_below_aot(scaled, executor)
    x, w = leaf(4), leaf(4)
    found, expected = (torch.autograd.grad(outer(fn, x, w), (x, w)) for fn in (compiled, scaled))
    torch.testing.assert_close(found, expected)


def test_buffers_change_at_every_call():
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.ReLU())
    like_eager(model, leaf(8, 5), calls=3)
    like_eager(model.eval(), leaf(8, 5))


def test_tensor_subclasses_go_in_and_come_out():
    class Named(torch.Tensor):
        pass

    like_eager(lambda x: torch.sin(x).as_subclass(Named), leaf(4))
    pair = TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_()
    out = compile_below_aot(lambda x: torch.sin(x) * 2)(pair)
    assert isinstance(out, TwoTensor)
    out.sum().backward()
    torch.testing.assert_close(pair.grad.b, 2 * pair.b.detach().cos())


def test_results_that_are_no_tensors():
    like_eager(lambda x: (torch.sin(x), None, 3, x.shape), leaf(4))


def test_a_graph_without_arguments_and_one_without_work():
    assert torch.equal(compile_below_aot(lambda: torch.ones(3) * 2)(), torch.full((3,), 2.0))
    like_eager(lambda x: x, leaf(4))


def test_constants_of_the_program_are_used():
    table = torch.randn(4)
    like_eager(lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + table, leaf(4))


# operators that are no plain ones


@both_executors
def test_branches_taken_at_run_time(executor):
    def branching(x):
        return torch.cond(x.sum() > 0, lambda a: a.sin() * 2, lambda a: a.cos() + 1, (x,))

    compile_fn = with_executor(executor)
    for sign in (1, -1):
        x = (torch.ones(4) * sign).requires_grad_()
        assert_like_eager(branching, x, compile_fn=compile_fn)


def test_a_loop_as_one_operator():
    from torch._higher_order_ops.map import map as map_rows

    like_eager(lambda rows, y: map_rows(lambda row, y: row.sin() * y, rows, y), leaf(3, 4), leaf(4))


def test_flex_attention_without_gradients():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    compiled = compile_below_aot(lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j)))
    bias = torch.arange(16.0)[:, None] - torch.arange(16.0)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(compiled(q, k, v), expected, rtol=1e-4, atol=1e-5)


def test_printing_in_the_function(capfd):
    def talking(x, w):
        torch._higher_order_ops.print("size {}", 3)
        return torch.sin(x), torch.cos(w)

    compiled = compile_below_aot(talking)
    x, w = leaf(3), leaf(3)
    compiled(x, w)[0].sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert w.grad is None
    assert capfd.readouterr().out.count("size 3") == 1


def test_an_effect_in_the_backward_is_refused():
    class Talking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            torch._higher_order_ops.print("backward")
            return grad * 2

    with pytest.raises(dynamo.exc.BackendCompilerFailed, match="effects in the backward") as caught:
        compile_below_aot(Talking.apply)(leaf(3)).sum().backward()
    assert isinstance(caught.value.inner_exception, UnsupportedError)


def test_operators_of_the_user():
    with torch.library._scoped_library("jointtrace_test", "FRAGMENT"):
        @torch.library.custom_op("jointtrace_test::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        twice.register_fake(torch.empty_like)
        twice.register_autograd(lambda ctx, grad: grad * 2)

        @torch.library.custom_op("jointtrace_test::bump", mutates_args={"x"})
        def bump(x: torch.Tensor) -> None:
            x.add_(1)

        def program(x, counter):
            bump(counter)
            fresh = torch.zeros(4)
            bump(fresh)
            return twice(torch.sin(x)) * counter * fresh

        like_eager(program, leaf(4), torch.zeros(4), calls=2)


def test_recurrent_and_convolutional_layers():
    like_eager(torch.nn.LSTM(4, 5, batch_first=True), leaf(2, 3, 4))
    convolution = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
    like_eager(convolution, leaf(2, 3, 8, 8))
