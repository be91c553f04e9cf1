import pytest
from passes import Depth, depth_of, figures_of, growth, rows_of


def test_linear_cost_has_growth_one_and_quadratic_cost_four():
    for power, expected in ((1, 1.0), (2, 4.0)):
        depths = [Depth("dynamo", layers, {"cse": layers**power * 0.1}, 0) for layers in (2, 4, 8, 16)]
        assert growth(depths) == pytest.approx(expected)


def test_growth_is_unknown_without_a_model_a_quarter_as_deep():
    assert growth([Depth("dynamo", 2, {"cse": 1.0}, 0)]) is None


def test_each_depth_and_the_growth_are_figures():
    quadratic = [Depth("dynamo", layers, {"cse": layers**2 * 0.004}, 0) for layers in (4, 16)]
    assert [figure.passed for figure in figures_of(quadratic)] == [True, False, False]
    assert figures_of([Depth("thunder", 4, {"cse": 0.4}, 0)])[0].passed, "thunder's trace is built by us"


def test_passes_are_shown_per_layer_with_their_sum():
    rows = rows_of([Depth("dynamo", 2, {"cse": 0.002, "dce": 0.004}, 50)])
    assert rows == [["cse", "1.00"], ["dce", "2.00"], ["all passes", "3.00"], ["ops of the joint trace", "50"]]


@pytest.mark.parametrize(("frontend", "first"), [("thunder", "build_joint"), ("dynamo", "joint")])
def test_the_passes_of_a_real_model_are_timed_up_to_the_split(frontend, first):
    depth = depth_of(frontend, 1, 32, "eager")
    assert depth.ops > 50
    assert {first, "cse", "split_forward"} <= set(depth.pass_s)
    assert depth.layer_ms > 0
