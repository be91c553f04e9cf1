"""Sizes unknown when the torch.compile front end compiles: one compilation for all of them."""
from __future__ import annotations

import pytest
import torch
import torch._dynamo as dynamo
from numerics.oracle import assert_like_eager, compile_below_aot, leaf

from jointtrace.frontends.aot import Session, backend

both_executors = pytest.mark.parametrize("executor", ["eager", "torch_compile"])


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    dynamo.reset()


def with_executor(executor):
    return lambda fn: compile_below_aot(fn, executor)


def counting(executor):
    """Return a backend, and a list of what it has compiled so far."""
    made = []

    def counted(module, inputs):
        made.append(backend(module, inputs, options={"executors": (executor,)}))  # or Dynamo starts again
        return made[-1]

    return counted, made


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 8))


@both_executors
def test_one_compilation_serves_all_lengths_and_batches(executor):
    (compiler, made), model = counting(executor), mlp()
    compiled = torch.compile(model, backend=compiler, dynamic=True)
    for batch, length in ((2, 64), (2, 100), (3, 128), (4, 200)):
        x = leaf(batch, length, 8)
        wanted = (x, *model.parameters())
        found, expected = (torch.autograd.grad(fn(x).square().sum(), wanted) for fn in (compiled, model))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(made) == 1


def test_a_dimension_marked_dynamic_compiles_once():
    (compiler, made), model = counting("eager"), mlp()
    compiled = torch.compile(model, backend=compiler)
    for length in (64, 100, 128):
        x = leaf(2, length, 8)
        dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(model(x).sum(), x))
    assert len(made) == 1


def test_a_size_found_to_change_compiles_twice():
    (compiler, made), model = counting("eager"), mlp()
    compiled = torch.compile(model, backend=compiler)
    for length in (64, 100, 128, 200):
        compiled(leaf(2, length, 8)).sum().backward()
    assert len(made) == 2


@both_executors
def test_regions_get_the_sizes_that_no_argument_of_theirs_has(executor):
    def folding(x):
        waves = torch.view_as_real(torch.fft.fft(torch.cat([x, x], 1).reshape(-1)))  # no region holds complex numbers
        return (waves.sin() * 2).exp()

    compiled = compile_below_aot(folding, executor, dynamic=True)
    for batch, length in ((2, 8), (3, 16), (5, 24)):
        assert_like_eager(folding, leaf(batch, length), compiled=compiled)


def test_passes_add_no_guards(monkeypatch):
    seen, partition = [], Session.partition

    def facts(env):
        return len(env.guards), len(env.replacements), len(env.axioms), len(env.deferred_runtime_asserts)

    def noting(self, joint, inputs, **given):
        env = next(value for value in inputs[0] if isinstance(value, torch.SymInt)).node.shape_env
        before = facts(env)
        halves = partition(self, joint, inputs, **given)
        seen.append((before, facts(env)))
        return halves

    monkeypatch.setattr(Session, "partition", noting)
    model = torch.nn.Sequential(mlp(), torch.nn.Dropout(0.5))
    compile_below_aot(model, "torch_compile", dynamic=True)(leaf(3, 5, 8)).sum().backward()
    (before, after), = seen
    assert before == after


def test_sizes_are_results():
    def sized(x):
        return x.sin().reshape(-1), x.shape[0] * 2, x.shape[1]

    compiled = compile_below_aot(sized, dynamic=True)
    for shape in ((3, 4), (5, 6)):
        assert_like_eager(sized, leaf(*shape), compiled=compiled)


def test_a_number_is_an_argument():
    def scaled(x, factor):
        return torch.sin(x) * factor

    compiled = compile_below_aot(scaled, dynamic=True)
    for factor in (1.5, 2.5, 3.5):
        assert_like_eager(scaled, leaf(4), factor, compiled=compiled)


@both_executors
def test_sizes_that_depend_on_values(executor):
    compile_fn = with_executor(executor)

    def head(x, count):
        n = count.item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        return x[:n].sin() * 2

    with dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        assert_like_eager(head, leaf(6), torch.tensor(3), compile_fn=compile_fn)
        assert_like_eager(lambda x: x[x > 0].sin() * 2, leaf(10), compile_fn=compile_fn)
