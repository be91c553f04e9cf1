"""memory: how long each piece of memory lives in a joint trace, and how much is alive when."""
from __future__ import annotations

from textwrap import dedent

import pytest
import torch

from jointtrace.ir.draw import counter_draws, operations
from jointtrace.ir.flops import flops
from jointtrace.ir.memory import plan_memory
from jointtrace.ir.op import Op, Tag, Target, TensorType, Var
from jointtrace.ir.text import parse
from jointtrace.passes._cost import recompute_cost
from tests.strategies import aten, call

STEP = parse(dedent("""
    trace (%x: f32[4, 4], %w: f32[4, 4]) {
      fw:
        %a: f32[4, 4] = aten.mm.default(%x, %w)  # [compute_bound]
        %b: f32[4, 4] = aten.sin.default(%a)
        %c: f32[4, 4] = aten.exp.default(%b)
        %v: f32[16] = aten.view.default(%c, [16])  # [view]
        %y: f32[] = aten.sum.default(%v)
      bw:
        %g: f32[] = get_grad(%y, 0)  # [get_grad]
        %d: f32[4, 4] = aten.mul.Tensor(%a, %g)
        %e: f32[4, 4] = aten.mul.Tensor(%d, %d)
        %dw: f32[4, 4] = aten.mm.default(%x, %e)  # [compute_bound]
      return (%y) grads (None, %dw)
    }
""").strip())


def nothing(op: Op) -> bool:
    return False


def everything(op: Op) -> bool:
    return Tag.GET_GRAD not in op.tags


def test_every_value_is_memory_from_its_op_to_its_last_reader_where_nothing_is_compiled():
    plan = plan_memory(STEP, nothing)
    spans = {life.name: (life.nbytes, life.start, life.end) for life in plan.lifetimes}
    assert spans == {"a": (64, 0, 6), "b": (64, 1, 2), "c": (64, 2, 4), "y": (4, 4, 9), "g": (4, 5, 6), "d": (64, 6, 7),
                     "e": (64, 7, 8), "dw": (64, 8, 9)}
    assert plan.alive == (64, 128, 192, 128, 132, 72, 136, 132, 132)
    assert (plan.peak, plan.peak_bytes) == (2, 192)


def test_what_passes_between_ops_of_a_compiled_loop_is_no_memory_and_keeps_what_it_reads_alive():
    plan = plan_memory(STEP, everything)
    spans = {life.name: (life.start, life.end) for life in plan.lifetimes}
    assert spans == {"a": (0, 7), "y": (4, 9), "g": (5, 7), "e": (7, 8), "dw": (8, 9)}
    assert (plan.peak, plan.peak_bytes) == (7, 64 + 4 + 4 + 64)


MATRICES = {"x": TensorType((8, 16), torch.float32), "w": TensorType((16, 32), torch.float32),
            "y": TensorType((8, 32), torch.float32), "r": TensorType((8, 1), torch.float32),
            "i": TensorType((4,), torch.int64), "p": TensorType((4, 16), torch.float32)}
PRODUCT = call(aten.mm.default, Var("x"), Var("w"), out=Var("y"))


def test_the_arithmetic_of_a_product_is_torch_s_formula_and_without_one_that_of_the_contraction():
    assert flops(PRODUCT, MATRICES) == 2 * 8 * 16 * 32
    unknown = Op(Target("product"), (Var("x"), Var("w")), out=Var("y"))
    assert flops(unknown, MATRICES) == 2 * 8 * 16 * 32


def test_attention_is_counted_by_the_formula_of_the_operator_whose_name_it_extends():
    types = {name: TensorType((2, 4, 64, 8), torch.float32) for name in "qkvo"}
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    op = call(attention, Var("q"), Var("k"), Var("v"), out=(Var("o"), None))
    assert flops(op, types) == 4 * 2 * 4 * 64 * 64 * 8


@pytest.mark.parametrize(
    ("op", "fused", "cost"),
    [
        (call(aten.view.default, Var("x"), [128], out=Var("x")), False, 0),
        (call(aten.sin.default, Var("x"), out=Var("x")), False, 2 * 512),  # reads and writes
        (call(aten.sin.default, Var("x"), out=Var("x")), True, 64),  # half a byte an element
        (call(aten.sum.dim_IntList, Var("x"), [1], True, out=Var("r")), True, 64 + 512),  # reads its operand again
        (call(aten.index.Tensor, Var("x"), [Var("i")], out=Var("p")), False, 2 * 256),  # no more than it picks
        (PRODUCT, True, round(2 * 8 * 16 * 32 / 30) + 512 + 2048 + 1024),
    ],
)
def test_what_it_costs_to_compute_an_op_again(op, fused, cost):
    assert recompute_cost(op, MATRICES, lambda _: fused and Tag.VIEW not in op.tags) == cost


def test_normal_numbers_cost_far_more_than_uniform_ones_and_these_more_than_an_op():
    draw = torch.ops.jointtrace.counter_draw.default
    assert counter_draws("normal", torch.float32)
    normal, uniform = (operations(draw, (Var("s"), [4], kind)) for kind in ("normal", "uniform"))
    assert normal > 100 * uniform > 100 > operations(aten.sin.default, (Var("x"),)) == 1
