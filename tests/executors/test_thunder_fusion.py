"""Any thunder fusion executor as one of ours, with thunder's own torch.compile executor, which runs on the CPU."""
from __future__ import annotations

import pytest
import thunder
import thunder.torch as ltorch
import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.executors.torch_compile import TorchCompileExecutor, torch_compile_ex
from thunder.executors.torchex import ex as torchex
from thunder.extend import ImplInfo

from jointtrace.errors import UnsupportedError
from jointtrace.executors.base import Executor
from jointtrace.executors.thunder_fusion import ThunderFusionExecutor
from jointtrace.ir.op import Op, Tag, Target, TensorType, Var, map_leaves
from jointtrace.ir.trace import Trace
from jointtrace.regions.fuse import fuse

NOT_CALLS = {PrimIDs.UNPACK_TRIVIAL, PrimIDs.RETURN}
pytestmark = pytest.mark.filterwarnings("ignore")  # thunder's own, and torch's about thunder


def traced(fn, *args):
    """`fn` as a trace whose ops carry thunder's bound symbols."""
    theirs = thunder.trace()(fn, *args)
    ops, types = [], {}

    def read(leaf):
        if isinstance(leaf, TensorProxy):
            types[leaf.name] = TensorType(tuple(leaf.shape), torch.float32)
        return Var(leaf.name) if isinstance(leaf, Proxy) else leaf

    for symbol in theirs.bound_symbols:
        if symbol.sym.id not in NOT_CALLS:
            parts = (tuple(symbol.args), dict(symbol.kwargs), symbol.output)
            ops.append(Op(Target(symbol.sym.name), *map_leaves(read, parts), payload=symbol))
    inputs = tuple(symbol.output.name for symbol in theirs.bound_symbols if symbol.sym.id is PrimIDs.UNPACK_TRIVIAL)
    return Trace(inputs, ops, (ops[-1].out,), types=types)


def rope_like(x, w):
    lib = torch if isinstance(x, torch.Tensor) else ltorch
    a, b = lib.sin(x), lib.cos(w)
    return lib.cat((a * b, a - w), 0)


X, W = torch.randn(3, 4), torch.randn(3, 4)
EXECUTOR = ThunderFusionExecutor(torch_compile_ex)


def executor_of_its_own(name, required):
    executor = TorchCompileExecutor(name, required_ops=required)
    executor._implmap = {op: ImplInfo() for op in torchex.implmap}
    return ThunderFusionExecutor(executor)


def test_it_is_an_executor():
    assert isinstance(EXECUTOR, Executor)
    assert (EXECUTOR.name, EXECUTOR.unavailable()) == ("torchcompile", None)


def test_thunder_compiles_a_region():
    (region,) = fuse(traced(rope_like, X, W), [EXECUTOR]).ops
    torch.testing.assert_close(EXECUTOR.compile(region)(X, W), (rope_like(X, W),))


def test_inputs_and_outputs_come_in_our_order():
    trace = traced(rope_like, X, W)
    trace = trace.rebuild(trace.ops, by="test", outputs=(*trace.outputs, trace.ops[1].out, trace.ops[0].out))
    (region,) = fuse(trace, [EXECUTOR]).ops
    results = dict(zip(region.outs, EXECUTOR.compile(region)(X, W), strict=True))
    torch.testing.assert_close(results[trace.ops[1].outs[0]], torch.cos(W))
    torch.testing.assert_close(results[trace.ops[0].outs[0]], torch.sin(X))


def test_names_that_a_pass_changed_reach_thunder():
    trace = traced(rope_like, X, W)
    first = trace.ops[0].outs[0]
    names = {first: "renamed"}
    ops = [op.rename_inputs(names).rename_outputs(names) for op in trace.ops]
    trace = trace.rebuild(ops, by="test", types={"renamed": trace.types[first]})
    (region,) = fuse(trace, [EXECUTOR]).ops
    torch.testing.assert_close(EXECUTOR.compile(region)(X, W), (rope_like(X, W),))


def test_an_input_that_a_pass_put_in_the_place_of_another_is_read():
    trace = traced(lambda x, w: ltorch.sin(x) * ltorch.sin(w), X, W)
    trace = trace.rebuild([op.rename_inputs({"w": "x"}) for op in trace.ops], by="test")
    (region,) = fuse(trace, [EXECUTOR]).ops
    assert region.ins == ("x",)
    torch.testing.assert_close(EXECUTOR.compile(region)(X), (torch.sin(X) ** 2,))


def test_a_group_without_a_required_op_runs_by_itself():
    for_cat = executor_of_its_own("for_cat", {"torch.cat", PrimIDs.CAT})
    (region,) = fuse(traced(rope_like, X, W), [for_cat]).ops
    torch.testing.assert_close(for_cat.compile(region)(X, W), (rope_like(X, W),))
    without = traced(lambda x, w: ltorch.sin(x) * ltorch.cos(w), X, W)
    assert fuse(without, [for_cat]).ops == without.ops


def test_an_op_that_thunder_cannot_fuse_is_not_claimed():
    narrow = executor_of_its_own("narrow", None)
    narrow.thunder_executor._implmap = {PrimIDs.SIN: ImplInfo()}
    sin, cos, *_ = traced(rope_like, X, W).ops
    assert narrow.can_run(sin, {})
    assert not narrow.can_run(cos, {})


def test_an_op_without_a_bound_symbol_is_not_claimed():
    assert not EXECUTOR.can_run(Op(Target("sin", torch.sin), (Var("x"),), out=Var("y")), {})


def test_an_op_with_a_tag_that_forbids_it_is_not_claimed():
    sin = traced(rope_like, X, W).ops[0]
    assert not EXECUTOR.can_run(sin.replace(tags=frozenset({Tag.OPAQUE})), {})


def test_a_failure_names_the_executor_the_region_and_the_ops():
    class Fails(TorchCompileExecutor):
        def fuse(self, region, fusion_counter):
            raise RuntimeError("no such luck")

    fails = ThunderFusionExecutor(Fails("fails"))
    fails.thunder_executor._implmap = {op: ImplInfo() for op in torchex.implmap}
    (region,) = fuse(traced(rope_like, X, W), [fails]).ops
    with pytest.raises(UnsupportedError, match=r"executor fails failed on region fails_0_fw \(sin, cos.*no such luck"):
        fails.compile(region)
