import torch
from floor import ProductRecorder, products_of, replay_of
from torch import nn
from torch.nn import functional as F

aten = torch.ops.aten


def shapes_of(calls):
    return [(call[0], *(tuple(x.shape) for x in call[1] if isinstance(x, torch.Tensor))) for call in calls]


def test_the_floor_is_the_products_of_the_forward_and_of_the_backward_at_their_shapes():
    linear = nn.Linear(8, 16, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    calls = products_of(lambda: linear(x).relu().sum().backward())
    forward, *backward = shapes_of(calls)
    assert forward == (aten.mm.default, (4, 8), (8, 16))
    assert sorted(backward, key=str) == sorted(
        [(aten.mm.default, (16, 4), (4, 8)), (aten.mm.default, (4, 16), (16, 8))], key=str
    )


def test_attention_counts_forward_and_backward():
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    calls = products_of(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward())
    assert [call[0] for call in calls] == [
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ]


def test_a_step_without_products_has_an_empty_floor():
    x = torch.randn(4, requires_grad=True)
    assert products_of(lambda: x.sin().sum().backward()) == []


def test_a_replay_runs_the_same_products_again():
    linear = nn.Linear(8, 16)
    calls = products_of(lambda: linear(torch.randn(4, 8)).sum().backward())
    with ProductRecorder() as again:
        replay_of(calls)()
    assert shapes_of(again.calls) == shapes_of(calls)
    assert len(calls) == 2
