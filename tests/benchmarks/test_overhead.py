import pytest
from overhead import call_of, compilers, figures_of, rows_of

from jointtrace.demo.measure import quartiles


def test_a_call_does_forward_and_backward_each_time():
    modules = []
    call = call_of(lambda module: modules.append(module) or module)
    call()
    first = modules[0].weight.grad
    call()
    assert modules[0].weight.grad is not first
    assert modules[0].weight.grad.equal(first), "gradients must not add up from call to call"


def test_the_figure_is_the_median_over_pairs_of_blocks():
    seconds = {"torch.compile": [1.0, 2.0, 1.0], "jointtrace": [1.5, 3.4, 1.4], "jointtrace-dynamo": [1.2, 2.4, 1.1]}
    figures = figures_of(seconds)
    assert [figure.measured for figure in figures] == pytest.approx([1.5, 1.2])
    assert [figure.passed for figure in figures] == [True, False]


def test_without_torch_compile_there_is_no_figure():
    assert figures_of({"eager": [1.0]}) == []
    assert list(compilers("no C++ compiler")) == ["eager", "thunder", "jointtrace-eager", "jointtrace-dynamo-eager"]


def test_rows_are_in_microseconds():
    assert quartiles([1e-6, 2e-6, 3e-6]).median == 2e-6
    assert rows_of({"eager": [1e-6, 2e-6, 3e-6]}) == [("eager", "2.0", "1.5", "2.5", "-")]
