"""Containers of arguments and results: nested, named, ordered, dataclasses, None."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numerics.oracle import leaf


class Pair(NamedTuple):
    """Two results by name."""

    first: Any
    second: Any


@dataclass
class Output:
    """Results of a model in one object."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


def test_a_named_tuple_is_given(like_eager):
    like_eager(lambda pair: pair.first * pair.second[0], Pair(leaf(3), [leaf(3)]))


def test_a_dict_keeps_its_order_and_its_keys(like_eager):
    like_eager(lambda x: {"z": x.sin(), "a": {"k": x * 2, 3: None}}, leaf(3))


def test_a_dataclass_is_returned(same_story):
    def story(fn, x):
        out = fn(x)
        assert type(out) is Output
        out.loss.backward()
        return out.logits, out.loss

    def program(x):
        logits = x * 2
        return Output(logits, logits.square().sum())

    same_story(story, program, leaf(3))


def test_a_dataclass_within_a_tuple_holds_none(same_story):
    def story(fn, x):
        out, more = fn(x)
        assert out.loss is None
        out.logits.sum().backward()
        return out.logits, more

    same_story(story, lambda x: (Output(x * 2), [x.cos(), None]), leaf(3))


def test_a_dataclass_is_given(same_story):
    def story(fn, x, w):
        out = fn(Output(x, w))
        out.sum().backward()
        return out

    same_story(story, lambda given: given.logits * given.loss.sin(), leaf(3), leaf(3))


def test_lists_are_built_and_emptied_on_the_way(like_eager):
    def program(x):
        stack = [x * i for i in range(3)]
        table = {"a": stack.pop()}
        table["b"] = stack.pop(0).sin()
        stack.extend(table.values())
        return stack, table, tuple(reversed(stack))

    like_eager(program, leaf(3))


def test_a_given_list_is_returned(like_eager):
    like_eager(lambda items: [items[0] * 2, *items[1:], None], [leaf(3), leaf(3), torch.arange(3)])


def test_empty_containers(like_eager):
    like_eager(lambda x, nothing: (x.sin(), [], {}, (), nothing), leaf(3), [])


def test_deeply_nested_results(like_eager):
    like_eager(lambda x: {"a": [({"b": [(x.sin(), None)]},), [[x.cos()]]]}, leaf(2))
