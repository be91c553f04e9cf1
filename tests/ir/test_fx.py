"""Graphs of AOTAutograd as traces, and back."""
from __future__ import annotations

import pytest
import torch
import torch._dynamo as dynamo
from numerics.oracle import leaf
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch.fx import Interpreter
from torch.utils.checkpoint import checkpoint

from jointtrace.ir.fx import to_joint_graph, to_trace
from jointtrace.ir.op import Op, Phase, ScalarType, Symbol, Tag, Target, TensorType, Var
from jointtrace.ir.sizes import bind_sizes
from jointtrace.ir.trace import Trace
from jointtrace.ir.verify import verify
from jointtrace.passes.recompute import recompute


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    dynamo.reset()


def joint_graph(fn, *args, **options):
    """Return the joint graph of `fn`, and how many of its results are the forward's."""
    found = []

    def partition(joint, inputs, *, num_fwd_outputs, **given):
        halves = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **given)
        found.append((joint, num_fwd_outputs))
        return halves

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, partition_fn=partition)
    torch.compile(fn, backend=backend, **options)(*args)
    return found[-1]


def ops_of(trace, name):
    return [op for op in trace.ops if op.target.name == name]


def test_a_joint_graph_becomes_forward_then_cotangents_then_backward():
    trace = to_trace(*joint_graph(lambda x, w: (torch.sin(x) @ w, torch.cos(w)), leaf(3, 4), leaf(4, 4))).trace
    verify(trace)
    gets = ops_of(trace, "get_grad")
    assert [get.args for get in gets] == [(out, i) for i, out in enumerate(trace.outputs)]
    assert len(trace.grads) == len(trace.inputs) == 2
    assert trace.ops[trace.boundary] is gets[0]
    assert trace.ops[0].source.file == "test_fx.py"


def test_a_cotangent_belongs_to_the_result_it_is_of():
    trace = to_trace(*joint_graph(lambda x, i: (i + 1, torch.sin(x), x.detach() * 2, torch.cos(x)), leaf(3),
                                  torch.arange(3))).trace
    assert [get.args[1] for get in ops_of(trace, "get_grad")] == [1, 3]


def test_there_and_back_is_the_same_program():
    joint, count = joint_graph(lambda x, w: torch.nn.functional.layer_norm(x @ w, (4,)).sin(), leaf(3, 4), leaf(4, 4))
    trace = to_trace(joint, count).trace
    back, nodes = to_joint_graph(trace, joint)
    assert to_trace(back, count).trace == trace
    args = [torch.randn(node.meta["val"].shape) for node in joint.graph.find_nodes(op="placeholder")]
    found, expected = (Interpreter(module).run(*args, enable_io_processing=False) for module in (back, joint))
    torch.testing.assert_close(found, expected)
    assert {name for op in trace.ops for name in op.outs} <= set(nodes)


def test_what_is_computed_again_gets_a_name_of_its_own():
    joint, count = joint_graph(lambda x: torch.nn.functional.layer_norm(x.sin(), (4,)).sin().cos(), leaf(3, 4))
    trace = recompute(to_trace(joint, count).trace, fused=lambda op: True)
    back, _ = to_joint_graph(trace, joint)
    names = [node.name for node in back.graph.nodes]
    assert any(name.startswith("bw_") for name in names)
    assert len(names) == len(set(names))
    back.graph.lint()


def test_an_op_without_a_phase_goes_by_what_it_reads():
    joint, count = joint_graph(lambda x: torch.sin(x).exp(), leaf(3))
    expected = to_trace(joint, count).trace
    for node in joint.graph.nodes:
        node.meta.pop("partitioner_tag", None)
    found = to_trace(joint, count).trace
    verify(found)
    reading = {op.outs[0] for op in expected.ops if op.phase is Phase.BW and "tangents_1" in op.ins}
    assert reading
    assert reading <= {op.outs[0] for op in found.ops if op.phase is Phase.BW}


def test_a_half_has_the_phase_it_is_given():
    joint, _ = joint_graph(lambda x: torch.sin(x).exp(), leaf(3))
    trace = to_trace(joint, phase=Phase.BW).trace
    assert {op.phase for op in trace.ops} == {Phase.BW}
    assert len(trace.ops) == sum(node.op == "call_function" for node in joint.graph.nodes)


def test_types_hold_strides_and_unknown_sizes():
    trace = to_trace(*joint_graph(lambda x: torch.sin(x.t()), leaf(3, 5), dynamic=True)).trace
    kinds = [trace.types[name] for name in trace.inputs]
    rows, columns = kinds[-1].shape
    assert kinds[:2] == [ScalarType("int"), ScalarType("int")]
    assert (rows.hint, columns.hint) == (3, 5)
    assert trace.types[trace.outputs[-1].name].strides == (1, columns)


def test_a_checkpoint_is_computed_again_but_for_what_it_hands_on():
    def chained(x):
        for _ in range(2):
            x = checkpoint(lambda x: torch.sin(x).cos(), x, use_reentrant=False)
        return x.exp()

    trace = to_trace(*joint_graph(chained, leaf(3))).trace
    forward = [op for op in trace.ops if op.phase is Phase.FW]
    tags = {name: [op.tags & {Tag.RECOMPUTE, Tag.SAVE} for op in forward if op.target.name == f"aten.{name}.default"]
            for name in ("sin", "cos", "exp")}
    assert tags == {"sin": [{Tag.RECOMPUTE}] * 2, "cos": [{Tag.SAVE}] * 2, "exp": [frozenset()]}


def test_what_reads_an_argument_that_is_overwritten_later_is_not_computed_again():
    def counted(x, counter):
        y = x * (counter.view(-1) * 2).sin()
        counter.add_(1)
        return y

    trace = to_trace(*joint_graph(counted, leaf(4), torch.zeros(4))).trace
    assert {tag for op in ops_of(trace, "aten.mul.Tensor")[:1] for tag in op.tags} == {Tag.SAVE}
    assert not any(op.tags & {Tag.SAVE} for op in ops_of(trace, "aten.sin.default"))


def test_a_region_is_given_the_sizes_it_uses():
    joint, count = joint_graph(lambda x: (x.reshape(-1).sin() * 2).exp(), leaf(3, 5), dynamic=True)
    half = to_trace(joint, count).trace
    half = half.rebuild([op for op in half.ops if op.phase is Phase.FW], by="test", grads=())
    inner = half.ops[1:]
    body = Trace(inner[0].ins, inner, half.outputs[-1:], types=half.types).rebuild(inner, by="test")
    region = Op(Target("region"), tuple(map(Var, body.inputs)), out=half.outputs[-1:], body=body)
    bound = bind_sizes(half.rebuild([half.ops[0], region], by="test"))
    numbers = {name for name in half.inputs if isinstance(half.types[name], ScalarType)}
    assert len(numbers) == 2
    assert {*bound.ops[1].ins} == {*numbers, *body.inputs}
    assert bound.ops[1].body.inputs == bound.ops[1].ins
    verify(bound)


def test_sizes_that_are_known_bind_nothing():
    trace = to_trace(*joint_graph(torch.sin, leaf(3))).trace
    assert bind_sizes(trace) is trace
    assert not any(isinstance(size, Symbol) for kind in trace.types.values() if isinstance(kind, TensorType)
                   for size in kind.shape)
