"""Facts of a trace, against small traces by hand and against what really happens when a trace runs."""
from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from strategies import aten, call, run, sample_cotangents, sample_inputs, traces

from jointtrace.ir import facts
from jointtrace.ir.op import ObjectType, ScalarType, Symbol, TensorType, Var
from jointtrace.ir.text import parse
from jointtrace.ir.trace import Trace

TRACE = parse("""
trace (%x: f32[2, 3], %w: f32[6]) {
  fw:
    %a: f32[2, 3] = aten.mul.Tensor(%x, %x)
    %v: f32[6] = aten.view.default(%a, [6])  # [view]
    %dead: f64[2, 3] = aten.to.dtype(%a, torch.float64)
    [%s: f32[3], %t: f32[3]] = aten.split.Tensor(%v, 3)  # [view]
    %out: f32[3] = aten.sin.default(%t)
  bw:
    %g: f32[3] = get_grad(%out, 0)  # [get_grad]
    %w_1: f32[6] = aten.copy_.default(%w, %v)  # [mutates] writes(%w)
    %gx: f32[2, 3] = aten.expand.default(%g, [2, 3])  # [view]
  return (%out, %out) grads (%gx, None)
}
""")


def test_uses_names_every_reader_once():
    found = facts.uses(TRACE)
    assert found["x"] == [0]
    assert found["v"] == [3, 6]
    assert found["out"] == [5, 8]
    assert found["dead"] == found["s"] == []


def test_last_use_is_the_maker_where_nothing_reads():
    found = facts.last_use(TRACE)
    assert (found["x"], found["a"], found["v"], found["dead"], found["out"], found["gx"]) == (0, 2, 6, 2, 8, 8)
    assert facts.last_use(Trace(("x",), (), ()))["x"] == -1


@given(traces())
def test_last_use_is_the_last_of_uses(trace):
    last = facts.last_use(trace)
    for name, positions in facts.uses(trace).items():
        if positions:
            assert last[name] == positions[-1]


def test_producers_knows_every_value_but_the_inputs():
    found = facts.producers(TRACE)
    assert found["t"] is found["s"] is TRACE.ops[3]
    assert set(found) == set(TRACE.types) - {"x", "w"}


def test_needed_follows_reads_to_the_inputs():
    assert facts.needed(TRACE, ["out"]) == {"out", "t", "v", "a", "x"}
    assert facts.needed(TRACE, ["w"]) == {"w"}
    assert facts.needed(TRACE, []) == frozenset()


def test_views_share_the_memory_of_their_base():
    found = facts.storage(TRACE)
    assert {name for name in found if found[name] == "a"} == {"a", "v", "s", "t"}
    assert found["dead"] == "dead"


def test_the_result_of_a_write_shares_the_memory_written_to():
    assert facts.storage(TRACE)["w_1"] == "w"


def test_the_results_of_several_writes_share_one_each():
    trace = parse("""
trace (%x: f32[1], %w: f32[1]) {
  fw:
    (%p: f32[1], %q: f32[1]) = both_(%x, %w)  # [mutates] writes(%x, %w)
    %r: f32[1] = either_(%p, %q)  # [mutates] writes(%p, %q)
  return ()
}
""")
    found = facts.storage(trace)
    assert (found["p"], found["q"], found["r"]) == ("x", "w", "x")


def test_a_wait_returns_the_memory_it_waited_for():
    trace = parse("""
trace (%x: f32[4]) {
  fw:
    %f: f32[4] = _c10d_functional.all_reduce.default(%x, 'sum', '0')  # [collective]
    %y: f32[4] = _c10d_functional.wait_tensor.default(%f)  # [wait]
  return (%y)
}
""")
    assert facts.storage(trace) == {"x": "x", "f": "f", "y": "f"}
    assert facts.live_bytes(trace) == [16, 16]


def test_a_view_shares_with_its_first_tensor_not_with_a_number():
    trace = parse("""
trace (%n: int, %x: f32[4]) {
  fw:
    %y: f32[2] = slice_to(%n, %x)  # [view]
  return (%y)
}
""")
    assert facts.storage(trace)["y"] == "x"


@given(traces())
def test_values_that_share_memory_when_run_share_a_storage(trace):
    owner = facts.storage(trace)
    owner_of_memory: dict[int, str] = {}
    for name, value in _values(trace).items():
        assert owner_of_memory.setdefault(value.untyped_storage().data_ptr(), owner[name]) == owner[name]


def _values(trace: Trace) -> dict[str, torch.Tensor]:
    """Return what every op of `trace` makes, as it is after the last op."""
    names = [name for op in trace.ops for name in op.outs]
    _, found = run(replace(trace, grads=tuple(map(Var, names))), sample_inputs(trace), sample_cotangents(trace))
    return dict(zip(names, found, strict=True))


def test_mutated_names_all_that_share_the_memory_written_to():
    assert facts.mutated(TRACE) == {"w", "w_1"}
    trace = parse("""
trace (%x: f32[2], %y: f32[2]) {
  fw:
    %v: f32[2] = aten.view.default(%x, [2])  # [view]
    %u: f32[2] = aten.view.default(%x, [2])  # [view]
    %u_1: f32[2] = aten.sin_.default(%u)  # [mutates] writes(%u)
  return (%y)
}
""")
    assert facts.mutated(trace) == {"x", "v", "u", "u_1"}


@given(traces())
def test_values_outside_mutated_keep_their_content(trace):
    ops = []
    for op in trace.ops:
        ops += [op, *(call(aten.clone.default, Var(name), out=Var(f"{name}_then")) for name in op.outs)]
    values = _values(replace(trace, ops=ops))
    for name in facts.producers(trace).keys() - facts.mutated(trace):
        torch.testing.assert_close(values[name], values[f"{name}_then"], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        (TensorType((2, 3), torch.float32), 24),
        (TensorType((), torch.float64), 8),
        (TensorType((0, 3), torch.float32), 0),
        (TensorType((0, 3), torch.float32, strides=(1, 1)), 0),
        (TensorType((Symbol("s0", 5), 2), torch.bfloat16), 20),
        (TensorType((2, 3), torch.float32, strides=(1, 2)), 24),
        (TensorType((2, 3), torch.float32, strides=(0, 0)), 4),
        (TensorType((2, 3), torch.float32, strides=(8, 1)), 44),
        (TensorType((2, 3), torch.float32, strides=(Symbol("s1", 4), 1)), 28),
        (ScalarType("int"), 0),
        (ObjectType(), 0),
    ],
    ids=repr,
)
def test_nbytes_is_the_memory_a_type_spans(type_, expected):
    assert facts.nbytes(type_) == expected


def test_nbytes_agrees_with_torch_for_every_dtype():
    dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of half complex numbers and of quantized tensors
        for dtype in dtypes:
            real = torch.empty(3, dtype=dtype).untyped_storage().nbytes()
            assert facts.nbytes(TensorType((3,), dtype)) == real, dtype


def test_live_bytes_counts_memory_and_frees_it_after_the_last_read_of_any_view():
    # a 24 (v, s, t in it) | dead 48 freed at once | out 12 | g 12, and gx in it | w is the caller's
    assert facts.live_bytes(TRACE) == [24, 24, 24, 24, 36, 48, 24, 24]


def test_peak_bytes_counts_what_an_op_reads_and_makes():
    assert facts.peak_bytes(TRACE) == 72  # a and dead
    assert facts.peak_bytes(Trace((), (), ())) == 0


def test_outputs_stay_alive_to_the_end():
    trace = parse("""
trace (%x: f32[4]) {
  fw:
    %a: f32[4] = aten.sin.default(%x)
    %b: f32[2] = aten.slice.Tensor(%a, 0, 0, 2)  # [view]
    %c: f32[4] = aten.sin.default(%x)
  return (%b)
}
""")
    assert facts.live_bytes(trace) == [16, 16, 16]
    assert facts.peak_bytes(trace) == 32


@given(traces())
def test_nothing_but_results_is_alive_at_the_end(trace):
    live = facts.live_bytes(trace)
    owner = facts.storage(trace)
    kept = {owner[name] for name in (*trace.output_names, *trace.grad_names)} - set(trace.inputs)
    assert min(live, default=0) >= 0
    assert [0, *live][-1] == sum(facts.nbytes(trace.types[name]) for name in kept)
    assert facts.peak_bytes(trace) >= max(live, default=0)
