"""Programs that set the gradient mode, and programs that ask what requires a gradient."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numerics.oracle import assert_like_eager, jit, leaf
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from jointtrace.errors import UnsupportedError


def without(x):
    with torch.no_grad():
        y = x.sin()
    return y, y * x


def in_inference_mode(x):
    with torch.inference_mode():
        y = x.sin()
    return y + x


def out_of_inference_mode(x):
    with torch.inference_mode(), torch.inference_mode(False):
        y = x.sin()
    return y * x


def with_within_without(x):
    with torch.no_grad():
        with torch.enable_grad():
            y = x.sin()
        z = x.cos()
    return y * z, z


def without_twice(x):
    with torch.no_grad():
        with torch.no_grad():
            y = x.sin()
        z = x.cos()
    return x * y * z


def set_and_set_back(x):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = x.sin()
    torch.set_grad_enabled(before)
    return y, y * x


@torch.no_grad()
def _sine(x):
    return x.sin()


@torch.inference_mode()
def _cosine(x):
    return x.cos()


def decorated(x):
    return _sine(x) * x + _cosine(x)


def asked(x):
    answers = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    with torch.no_grad():
        answers += [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    with torch.inference_mode():
        answers += [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    return x * sum(2**i for i, answer in enumerate(answers) if answer)


class _AskedInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch.no_grad():
            factor = 2 if torch.is_grad_enabled() else 3
        return x * (factor if torch.is_grad_enabled() else 5)

    @staticmethod
    def backward(ctx, grad):
        return grad * (7 if torch.is_grad_enabled() else 11)


def asked_inside_a_function(x):
    return _AskedInside.apply(x) * x


PROGRAMS = [without, in_inference_mode, out_of_inference_mode, with_within_without, without_twice, set_and_set_back,
            decorated, asked, asked_inside_a_function]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_mode_is_that_of_eager(program, like_eager):
    like_eager(program, leaf(3))


def test_nothing_has_a_gradient_where_all_is_in_inference_mode(compile_fn):
    out = compile_fn(_cosine)(leaf(3))
    assert not out.requires_grad


def test_the_mode_of_the_process_is_left_alone_where_a_program_is_refused():
    def refused(x):
        with torch.inference_mode():
            return x * float(x.sum())

    with pytest.raises(UnsupportedError):
        jit(refused)(leaf(3))
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


ASKED = {
    "an argument": lambda x: x,
    "a result": lambda x: x * 2,
    "a comparison": lambda x: x > 0,
    "a position": lambda x: x.argmax(0),
    "sorted values": lambda x: x.sort()[0],
    "new zeros": lambda x: x.new_zeros(3),
    "zeros like it": lambda x: torch.zeros_like(x),
    "a sum with zeros": lambda x: torch.zeros(3, 3) + x,
    "a detached value": lambda x: x.detach() * 2,
    "a rounded value": lambda x: x.floor(),
    "a draw": lambda x: torch.bernoulli(x.sigmoid()),
    "a dropout": lambda x: F.dropout(x, 0.5),
    "a part": lambda x: x.split(1)[1],
    "an integer": lambda x: x.to(torch.int64).float(),
    "another precision": lambda x: x.bfloat16(),
    "a checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    "what was added to": lambda x: torch.zeros(3, 3).add_(x),
    "what was copied to": lambda x: torch.zeros(3, 3).copy_(x),
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("trains", [True, False])
def test_whether_it_requires_a_gradient(name, trains, like_eager):
    def program(x, y):
        return y * (2 if ASKED[name](x).requires_grad else 3)

    like_eager(program, torch.randn(3, 3).requires_grad_(trains), leaf(3))


def test_what_was_written_to_through_a_view_requires_a_gradient():
    """On thunder; Dynamo itself, also with its eager backend, does not say so of the base of the view."""
    def program(x):
        zeros, part, apart = torch.zeros(3, 3), torch.zeros(3, 3), torch.zeros(3, 3)
        zeros[0].add_(x[0])
        part[0] = x[0]
        with torch.no_grad():
            apart[0] = x[0]
        return x * sum(2**i for i, t in enumerate((zeros, zeros[1], part, apart)) if t.requires_grad)

    assert_like_eager(program, leaf(3, 3))


def test_nothing_requires_a_gradient_without_gradients(like_eager):
    def program(x):
        with torch.no_grad():
            y = x * 2
        return x * (2 if y.requires_grad else 3) * (5 if (y * x).requires_grad else 7)

    like_eager(program, leaf(3))


def test_the_class_of_a_tensor_is_asked_for(like_eager):
    def program(x):
        known = [type(x) is torch.Tensor, type(x * 2) is torch.Tensor, x.__class__ is torch.Tensor]
        return x * sum(2**i for i, answer in enumerate(known) if answer)

    like_eager(program, leaf(3))


def test_the_class_of_a_parameter_is_asked_for(like_eager):
    class Asks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("b", torch.ones(3))

        def forward(self, x):
            return x * self.w * (2 if type(self.w) is torch.nn.Parameter else 3) * (5 if type(self.b) is type(x) else 7)

    like_eager(Asks(), leaf(3))


def test_hooks_on_saved_tensors_within_a_program_are_refused_on_thunder():
    def offloads(x):
        with save_on_cpu():
            return x * x

    line = offloads.__code__.co_firstlineno + 1
    with pytest.raises(UnsupportedError, match=rf"save_on_cpu \(.*test_grad_mode.py:{line}\): .* around the call"):
        jit(offloads)(leaf(3))
    assert_like_eager(lambda x: x * x, leaf(3))
