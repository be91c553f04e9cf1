"""A region takes over what it reads last: saved tensors and cotangents die while the backward runs."""
import thunder
import torch


def chain(x, w):
    for _ in range(3):
        x = torch.tanh(x @ w)
    return x.sum()


def test_a_region_is_handed_the_values_it_reads_last():
    step = thunder.jit(chain, delay_trace_split=True, jointtrace={"executors": ("torch_compile",)})
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    step(x, w).backward()
    source = thunder.last_backward_traces(step)[-1].python()
    call = source.index(".boxed(")
    assert "del " in source[:call].splitlines()[-2]
    assert "del " not in source[call:]


def test_the_gradients_are_those_of_eager():
    step = thunder.jit(chain, delay_trace_split=True, jointtrace={"executors": ("torch_compile",)})
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(chain(x, w), (x, w))
    torch.testing.assert_close(torch.autograd.grad(step(x, w), (x, w)), expected)
