"""In-place operations and views: what shares memory shows a write, in value and in gradient, as in eager PyTorch."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numerics.oracle import assert_like_eager, jit, leaf
from torch.utils.checkpoint import checkpoint

import jointtrace
from jointtrace.errors import UnsupportedError

VIEWS = {
    "view": lambda y: y.view(-1),
    "slice": lambda y: y[1:],
    "slice with a step": lambda y: y[..., ::2],
    "row": lambda y: y[0],
    "column": lambda y: y[:, 1],
    "transpose": lambda y: y.t(),
    "view of a view": lambda y: y[1:].t()[0],
    "reshape of a view": lambda y: y[1].reshape(2, 2),
    "narrow": lambda y: torch.narrow(y, 0, 1, 2),
    "unsqueeze": lambda y: y.unsqueeze(0)[0, 1:],
    "select": lambda y: y.select(1, 0),
    "permute": lambda y: y.permute(1, 0)[1:3],
    "moveaxis": lambda y: torch.moveaxis(y, 0, 1)[2],
    "ravel": lambda y: y.ravel()[3:9],
    "itself": lambda y: y,
}


@pytest.mark.parametrize("look", [pytest.param(v, id=k) for k, v in VIEWS.items()])
def test_the_base_shows_a_write_through_a_view(look):
    def program(x):
        y = torch.sin(x)
        look(y).mul_(3)
        return y * y

    assert_like_eager(program, leaf(4, 4))


@pytest.mark.parametrize("look", [pytest.param(v, id=k) for k, v in VIEWS.items()])
def test_a_view_made_before_shows_a_write_to_the_base(look):
    def program(x):
        y = torch.sin(x)
        view = look(y)
        y.mul_(x)
        return view * 2

    assert_like_eager(program, leaf(4, 4))


@pytest.mark.parametrize(("look", "same"), [
    pytest.param(lambda y: torch.chunk(y, 2, 1)[1], lambda y: y[:, 2:], id="chunk"),
    pytest.param(lambda y: y.split([1, 3], 1)[1], lambda y: y[:, 1:], id="split"),
    pytest.param(lambda y: y.unbind(1)[2], lambda y: y[:, 2], id="unbind"),
])
def test_views_made_together_show_a_write_to_the_base(look, same):
    def program(x):
        y = torch.sin(x)
        view = look(y)
        y.mul_(x)
        return view * 2

    x = leaf(4, 4)
    jit(program)(x).sum().backward()  # eager refuses
    (expected,) = torch.autograd.grad((same(x.sin() * x) * 2).sum(), x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("executor", ["eager", "torch_compile"])
def test_two_views_of_one_base_show_each_others_writes(executor):
    def program(x, w):
        y = torch.sin(x)
        rows, columns = y[1:], y[:, 2:]
        rows.mul_(w[1:])
        columns.add_(rows[:, :2].sum())
        return rows * 2, columns.cos(), y

    assert_like_eager(program, leaf(4, 4), leaf(4, 4), compile_fn=lambda fn: jit(fn, executor))


def test_writes_in_sequence_to_overlapping_views():
    def program(x, w):
        y = x * 2
        y[0] = w[0]
        y[:, 0] = y[:, 1] * w[1]
        y[1:].mul_(w[1:])
        y.view(-1)[3:9].mul_(w.view(-1)[3:9])
        y[0].add_(y[1])
        return y.cos()

    assert_like_eager(program, leaf(4, 4), torch.randn(4, 4))


def test_a_write_through_a_view_of_a_written_view():
    def program(x, w):
        y = torch.sin(x)
        v = y[1:]
        v.mul_(w[1:])
        u = v[0]
        u.mul_(w[0])
        return v.sin(), u, y

    assert_like_eager(program, leaf(4, 4), leaf(4, 4))


def test_elements_are_set_by_index_and_by_mask():
    def program(x, w, index):
        y = torch.sin(x)
        y[:, 0] = 0.25
        y[index] = w[:2] * 2
        y.masked_fill_(y > 0.5, 0.5)
        return y * w

    assert_like_eager(program, leaf(4, 4), leaf(4, 4), torch.tensor([0, 3]))


def test_indexing_by_a_tensor_makes_a_copy_and_not_a_view():
    def program(x, index):
        y = torch.sin(x)
        y[index].mul_(5)
        return y

    assert_like_eager(program, leaf(4, 4), torch.tensor([0, 3]))


def test_a_value_the_backward_needs_is_kept_when_it_is_overwritten():
    def program(x, w):
        y = torch.sin(x)
        y.mul_(w)  # the gradient of w needs the y of before
        return y

    assert_like_eager(program, leaf(4), leaf(4))


def test_a_view_the_backward_needs_is_kept_when_its_base_is_overwritten():
    def program(x, w):
        y = torch.sin(x)
        product = y[1:].clone() * y[:1]
        y.mul_(w)
        return product, y

    compiled = jit(program)
    x, w = leaf(4), leaf(4)
    product, y = compiled(x, w)
    (product.sum() + y.sum()).backward()
    expected_x, expected_w = torch.autograd.grad(  # eager raises here: the program without the write in place
        (x.sin()[1:] * x.sin()[:1]).sum() + (x.sin() * w).sum(), (x, w))
    torch.testing.assert_close(x.grad, expected_x)
    torch.testing.assert_close(w.grad, expected_w)


@pytest.mark.parametrize("look", [lambda y: y, lambda y: y.view(-1)], ids=["itself", "a view of all of it"])
def test_a_value_overwritten_as_a_whole_gets_zeros(look):
    def program(x, w):
        y = torch.sin(x)
        look(y).copy_(look(w))
        return y

    assert_like_eager(program, leaf(2, 2), leaf(2, 2))


class Writing(torch.autograd.Function):
    """Writes in place to what it makes, in both directions."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = x * 2
        y.sin_()
        return y

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        grad = g * x
        grad.mul_(3)
        return grad


def test_a_custom_function_writes_to_what_it_makes():
    assert_like_eager(lambda x: Writing.apply(x).cos(), leaf(4))


class WritingBack(Writing):
    """Writes in place in its backward alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)


def test_a_custom_backward_writes_to_what_it_makes():
    def program(x):
        y = x * 2
        y.add_(1)
        return WritingBack.apply(y.exp()), y

    assert_like_eager(program, leaf(4))


def test_a_zeroed_value_still_requires_a_gradient():
    def program(x):
        y = torch.sin(x)
        y.zero_()
        return y, x * 2

    assert_like_eager(program, leaf(4))


def test_a_write_without_grad_changes_the_value_and_not_the_gradient():
    def program(x):
        y = torch.sin(x)
        with torch.no_grad():
            y.mul_(3)
            y[0].add_(1)
        return y * x.detach(), y

    assert_like_eager(program, leaf(4, 2))


def test_a_write_to_a_detached_alias_changes_the_value_and_not_the_gradient():
    def program(x):
        y = x * 3
        y.detach().mul_(2)
        return y.sum(0), y

    assert_like_eager(program, leaf(4, 2))


@pytest.mark.parametrize("look", [lambda v: v, lambda v: v[1:], lambda v: v.t()], ids=["itself", "a part", "turned"])
def test_a_detached_alias_has_the_gradient_of_what_is_written_to_it(look):
    def program(x, w):
        y = x * 3
        alias = y.detach()
        part = look(alias)
        part.mul_(look(w))
        y.add_(1)
        return alias * 2, part.sin(), y

    assert_like_eager(program, leaf(4, 4), leaf(4, 4))


def test_a_detached_alias_of_an_argument_is_the_argument():
    def program(x):
        x.detach().mul_(2)
        return x.sin()

    assert_like_eager(program, leaf(4))


def test_an_argument_is_written_through_a_view():
    def program(x, state):
        state[1:].add_(1)
        state.view(-1)[0] = 7
        return x * state

    assert_like_eager(program, leaf(4, 4), torch.randn(4, 4), calls=2)


def test_a_written_argument_is_returned():
    def program(x, state):
        view = state[0]
        state.mul_(2)
        return state, view, x.sin()

    assert_like_eager(program, leaf(3), torch.randn(2, 3))


def test_writes_inside_a_checkpoint():
    def program(x, w):
        def inner(a):
            y = torch.sin(a)
            y[1:].mul_(w[1:])
            return y.cos() * a

        return checkpoint(inner, x, use_reentrant=False)

    assert_like_eager(program, leaf(4), leaf(4))


def test_the_result_of_a_checkpoint_is_written():
    def program(x):
        y = checkpoint(lambda a: a.sin() * a, x, use_reentrant=False)
        view = y[1:]
        y.mul_(2)
        return view.exp()

    assert_like_eager(program, leaf(4))


def test_an_inplace_activation_between_linear_layers():
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(inplace=True), torch.nn.Linear(5, 3))
    assert_like_eager(model, leaf(6, 4))


@pytest.mark.parametrize("executor", ["eager", "torch_compile"])
def test_a_copy_of_a_transposed_tensor_is_no_view(executor):
    def program(x):
        y = torch.sin(x)
        z = y.t().contiguous()
        z.mul_(2)
        return z

    assert_like_eager(program, leaf(3, 4), compile_fn=lambda fn: jit(fn, executor))


def test_contiguous_of_a_contiguous_tensor_is_that_tensor():
    def program(x):
        y = torch.sin(x)
        y.contiguous().mul_(2)
        y.float()[0].add_(1)
        return y * 2

    assert_like_eager(program, leaf(3, 4))


@pytest.mark.parametrize("name", ["reshape", "ravel"])
def test_a_copy_that_was_taken_for_a_view_is_an_error_at_run_time(name):
    def program(x):
        y = torch.sin(x)
        flat = y.reshape(-1) if name == "reshape" else y.ravel()
        flat.mul_(2)
        return y * 2

    compiled = jit(program)
    compiled(torch.randn(3, 4))
    with pytest.raises(UnsupportedError, match=rf"test_alias.py:\d+ writes in place to a result of {name}"):
        compiled(torch.randn(4, 3).t())


def test_a_write_through_a_reshape_and_one_through_a_part_of_it():
    def program(x):
        y = torch.sin(x)
        flat = y.reshape(-1)
        flat.mul_(2)
        flat[1:3].mul_(3)
        return y * y, flat

    assert_like_eager(program, leaf(3, 4))


def both_ways(program, make):
    """Run `program` in eager and compiled; return for each the gradient of all that is reachable afterwards."""
    grads = []
    for fn in (program, jit(program)):
        torch.manual_seed(0)
        source = leaf(3)
        args = make(source)
        outputs = [t for t in (*fn(*args), *args) if t.requires_grad]
        sum((out * out).sum() * (i + 1) for i, out in enumerate(outputs)).backward()
        grads.append((source.grad, [t.requires_grad for t in args]))
    return grads


@pytest.mark.parametrize("program", [
    lambda x, state: (state.copy_(x * 2), x.sin())[1:],
    lambda x, state: (state.mul_(x), state[1:], state.sin())[1:],
    lambda x, state: (state[1:].mul_(x[1:]), x.sin())[1:],
    lambda x, state: (state.zero_(), state.sin() + x.sum())[1:],
    lambda x, state: (state.mul_(x), state)[1:],
    lambda x, state: (state.mul_(x), state, state)[1:],
], ids=["replaced", "views returned", "a part", "zeroed", "returned", "returned twice"])
@pytest.mark.parametrize("make", [lambda x: (x, torch.ones(3)), lambda x: (x, x * 3)], ids=["no gradient", "no leaf"])
def test_a_written_argument_has_its_gradient_history_after_the_call(program, make):
    eager, compiled = both_ways(program, make)
    torch.testing.assert_close(compiled[0], eager[0])
    assert compiled[1] == eager[1]


def test_a_state_that_is_written_at_every_call_carries_gradients_through_all():
    def step(x, state):
        state.add_(x).sin_()
        return x * 1

    grads = []
    for fn in (step, jit(step)):
        torch.manual_seed(0)
        x, state = leaf(3), torch.zeros(3)
        for _ in range(3):
            fn(x, state)
        (state * state).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("make", "kind"), [(leaf, "leaf"), (lambda n: torch.zeros(2 * n)[:n], "view")], ids=["leaf", "view"])
def test_an_argument_that_cannot_get_a_history_is_not_written(make, kind):
    compiled, written = jit(lambda x, state: (state.copy_(x), x.sin())[1]), make(3)
    before = written.detach().clone()
    with pytest.raises(UnsupportedError, match=rf"writes in place to state, a {kind}.*clone of it"):
        compiled(leaf(3), written)
    torch.testing.assert_close(written.detach(), before)


def test_a_detached_value_is_written_to_an_argument():
    def program(x, cache):
        cache[0] = x.detach()
        return (cache * x).sum()

    assert_like_eager(program, leaf(3), torch.zeros(2, 3))


def test_statistics_of_a_batch_norm_are_no_part_of_the_gradient():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.ReLU(inplace=True), torch.nn.BatchNorm1d(3))
    assert_like_eager(model, leaf(6, 3), calls=2)


def test_a_parameter_is_written_without_grad():
    class Decaying(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3))

        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return x * self.weight

    assert_like_eager(Decaying(), leaf(2, 3), calls=2)


def test_reads_before_a_write_see_the_old_value():
    def program(x):
        y = torch.sin(x)
        before = y * 2
        y.add_(1)
        after = y * 2
        return before, after

    assert_like_eager(program, leaf(4))


def test_a_program_without_writes_has_no_ops_for_them():
    compiled = jit(lambda x: (torch.sin(x)[1:] * 2).view(-1))
    compiled(leaf(3, 3))
    assert "refresh" not in jointtrace.dump(compiled)


@pytest.mark.parametrize("other", [lambda b: b[:2], lambda b: b.t()], ids=["a part", "turned"])
def test_a_written_argument_must_not_share_memory_with_another(other):
    def program(x, a, b):
        a.mul_(2)
        return x * a, b + 1

    a = torch.randn(3, 3)
    compiled = jit(program)
    with pytest.raises(UnsupportedError, match=r"arguments a and b share memory, .* in place to a; pass a clone"):
        compiled(leaf(3, 3), a, other(a))
    assert_like_eager(program, leaf(3, 3), a, torch.randn(3, 3), compiled=compiled)


def test_arguments_may_share_memory_that_nobody_writes_to():
    def program(a, b, counter):
        counter.add_(1)
        return a * b * counter

    a = torch.randn(3, 3)
    assert_like_eager(program, a, a.t(), torch.zeros(1))


@pytest.mark.parametrize("look", [lambda y: y.contiguous(), lambda y: y.float(), lambda y: y.ravel()],
                         ids=["contiguous", "float", "ravel"])
def test_what_may_be_a_view_is_kept_for_the_backward_when_its_base_is_overwritten(look):
    def program(x):
        y = torch.sin(x)
        saved = look(y).sin()
        y.mul_(2)
        return saved.sum() + y.sum()

    x = leaf(3, 4)
    jit(program)(x).backward()  # eager refuses
    (expected,) = torch.autograd.grad(x.sin().sin().sum() + 2 * x.sin().sum(), x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("activate", [F.relu, F.silu, F.leaky_relu], ids=lambda f: f.__name__)
def test_an_activation_in_place_whose_functional_form_has_a_rule(activate):
    def program(x):
        y = torch.sin(x)
        view = y[1:]
        activate(y, inplace=True)
        return view * 2

    assert_like_eager(program, leaf(4))


def test_a_custom_function_must_not_write_to_what_it_is_given():
    class WritingArgument(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.mul_(2)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return g * 5

    with pytest.raises(UnsupportedError, match=r"test_alias.py:\d+ writes in place to what it is given"):
        jit(lambda x: WritingArgument.apply(x))(leaf(4))  # of what is no argument thunder refuses it itself
