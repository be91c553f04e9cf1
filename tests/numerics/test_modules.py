"""Modules with state: buffers over several calls, tied, frozen and adapted parameters, training and evaluation."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numerics.oracle import leaf


class Module(torch.nn.Module):
    """A module made of a function of itself and its input, and of its parameters, buffers and parts."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, torch.nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args):
        return self.run(self, *args)


def parameter(*shape, frozen=False):
    return torch.nn.Parameter(torch.randn(shape), requires_grad=not frozen)


@pytest.mark.also_fused
def test_a_counter_and_a_moving_average(like_eager):
    def run(m, x):
        m.count.add_(1)
        m.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x - m.average) / m.count

    like_eager(Module(run, count=torch.zeros(()), average=torch.zeros(4)), leaf(3, 4), calls=3)


def test_an_integer_counter(like_eager):
    def run(m, x):
        m.steps += 1
        return x * m.steps

    like_eager(Module(run, steps=torch.tensor(0)), leaf(3), calls=3)


def test_a_buffer_that_is_replaced(like_eager):
    def run(m, x):
        m.state = m.state * 0.5 + x.detach().sum(0)
        return x * m.state

    like_eager(Module(run, state=torch.zeros(4)), leaf(3, 4), calls=3)


def test_a_cache_is_filled_call_by_call(same_story):
    def story(fn, *steps):
        outs = [fn(x, torch.tensor([i])) for i, x in enumerate(steps)]
        sum(out.sum() for out in outs).backward()
        return outs

    def run(m, x, position):
        with torch.no_grad():
            m.cache.index_copy_(0, position, x.unsqueeze(0))
        return (m.cache.clone() * x).sum(-1)

    same_story(story, Module(run, cache=torch.zeros(3, 4)), leaf(4), leaf(4), leaf(4))


def test_batch_norm_in_training_and_in_evaluation(same_story):
    def story(fn, x):
        outs = []
        for training in (True, True, False, True):
            fn.train(training)
            outs.append(fn(x))
            outs[-1].square().sum().backward()
        return outs

    same_story(story, torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)), leaf(6, 3))


def test_dropout_stops_in_evaluation(same_story):
    def story(fn, x):
        fn(x)
        fn.eval()
        out = fn(x)
        out.sum().backward()
        return out

    same_story(story, torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5)), leaf(6, 3))


@pytest.mark.also_fused
def test_tied_weights(like_eager):
    embedding, head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    like_eager(Module(lambda m, i: m.head(m.embedding(i).tanh()), embedding=embedding, head=head), torch.arange(5))


def test_one_layer_used_twice(like_eager):
    layer = torch.nn.Linear(4, 4)
    like_eager(torch.nn.Sequential(layer, torch.nn.Tanh(), layer), leaf(3, 4))


def test_a_weight_and_its_transpose(like_eager):
    like_eager(Module(lambda m, x: (x @ m.w).relu() @ m.w.t(), w=parameter(3, 5)), leaf(2, 3))


def test_frozen_parameters_get_no_gradient(like_eager):
    frozen = torch.nn.Linear(3, 4).requires_grad_(False)
    like_eager(torch.nn.Sequential(frozen, torch.nn.GELU(), torch.nn.Linear(4, 2)), torch.randn(5, 3))


def test_only_a_bias_is_trained(like_eager):
    layer = torch.nn.Linear(3, 4)
    layer.weight.requires_grad_(False)
    norm = torch.nn.LayerNorm(4).requires_grad_(False)
    like_eager(torch.nn.Sequential(layer, torch.nn.Tanh(), norm), torch.randn(2, 3))


def test_parameters_are_frozen_between_calls(same_story):
    def story(fn, x):
        first, second = [p for p in fn.parameters() if p.ndim == 2]
        outs = []
        for frozen in (first, second, None):
            for p in (first, second):
                p.requires_grad_(p is not frozen)
            outs.append(fn(x))
            outs[-1].square().sum().backward()
        return outs

    same_story(story, torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), leaf(5, 3))


@pytest.mark.also_fused
def test_a_low_rank_adapter_beside_a_frozen_weight(like_eager):
    def run(m, x):
        return F.linear(x, m.weight) + (x @ m.down.t() @ m.up.t()) * 0.5

    like_eager(Module(run, weight=parameter(4, 3, frozen=True), down=parameter(2, 3), up=parameter(4, 2)), leaf(5, 3))


def test_an_adapter_merged_into_the_weight(like_eager):
    def run(m, x):
        return F.linear(x, m.weight + m.up @ m.down)

    like_eager(Module(run, weight=parameter(4, 3, frozen=True), down=parameter(2, 3), up=parameter(4, 2)),
               torch.randn(5, 3))


def test_an_adapter_is_switched_off_and_on(same_story):
    def story(fn, x):
        outs = [fn(x, True), fn(x, False), fn(x, True)]
        sum(out.cos().sum() for out in outs).backward()
        return outs

    def run(m, x, adapted):
        y = x @ m.weight
        return y + x @ m.adapter if adapted else y

    same_story(story, Module(run, weight=parameter(3, 4, frozen=True), adapter=parameter(3, 4)), leaf(2, 3))


def test_a_parameter_that_is_not_used(like_eager):
    like_eager(Module(lambda m, x: x * m.used, used=parameter(3), spare=parameter(3)), leaf(3))


def test_parameters_in_lists_and_dicts(like_eager):
    def run(m, x):
        for w in m.many:
            x = x * w
        return x + m.named["bias"]

    like_eager(Module(run, many=torch.nn.ParameterList([parameter(3) for _ in range(3)]),
                      named=torch.nn.ParameterDict({"bias": parameter(3)})), leaf(2, 3))


def test_an_empty_parameter(like_eager):
    like_eager(Module(lambda m, x: torch.cat((x, m.nothing)).sin(), nothing=parameter(0, 3)), leaf(2, 3))


def test_a_reparametrized_weight(like_eager):
    def run(m, x):
        return F.linear(x, m.direction / m.direction.norm(dim=1, keepdim=True) * m.length)

    like_eager(Module(run, direction=parameter(4, 3), length=parameter(4, 1)), leaf(2, 3))


def test_steps_of_an_optimizer(same_story):
    def story(fn, x):
        optimizer = torch.optim.AdamW(fn.parameters(), 0.1)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = fn(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    same_story(story, layers, torch.randn(4, 3))


def test_weights_are_loaded_between_calls(same_story):
    def story(fn, x):
        first = fn(x)
        first.sum().backward()
        with torch.no_grad():
            for p in fn.parameters():
                p.copy_(torch.ones_like(p))
        second = fn(x)
        second.cos().sum().backward()
        return first, second

    same_story(story, torch.nn.Sequential(torch.nn.Linear(3, 2)), leaf(2, 3))


def test_a_setting_of_the_module_changes(same_story):
    def run(m, x):
        return F.group_norm(x, 2, m.w, m.b) if m.training else x * m.w[0]

    def both(fn, x):
        outs = [fn(x)]
        fn.eval()
        outs.append(fn(x))
        sum(out.cos().sum() for out in outs).backward()
        return outs

    same_story(both, Module(run, w=parameter(4), b=parameter(4)), leaf(2, 4, 3))
