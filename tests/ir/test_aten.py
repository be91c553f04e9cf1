"""Tags of torch operators agree with what torch says of each, for all of them."""
from __future__ import annotations

import math
import operator

import pytest
import torch
import torch.distributed._functional_collectives
from strategies import aten

from jointtrace.ir.aten import is_random, tags_of, writes_of
from jointtrace.ir.op import Tag, Var


def overloads(namespace) -> list:
    found = []
    for name in dir(namespace):
        packet = getattr(namespace, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return found


ATEN = overloads(aten)


def of_aten(tag: Tag) -> set[str]:
    return {str(op) for op in ATEN if tag in tags_of(op)}


def test_there_are_aten_operators_to_walk():
    assert len(ATEN) > 1500


def test_mutates_is_said_of_every_operator_that_is_not_functional():
    assert of_aten(Tag.MUTATES) == {str(op) for op in ATEN if op._schema.is_mutable}


def test_every_in_place_and_out_variant_mutates():
    named = {str(op) for op in ATEN if op.overloadpacket.__name__.endswith("_") and "__" not in str(op)}
    named |= {str(op) for op in ATEN if any(arg.is_out for arg in op._schema.arguments)}
    assert len(named) > 500
    silent = {"aten.sym_is_contiguous", "aten.is_set_to"}
    assert named - of_aten(Tag.MUTATES) - silent == set()


def test_random_is_said_of_every_operator_that_draws():
    tagged = {str(op) for op in ATEN if torch.Tag.nondeterministic_seeded in op.tags}
    given_a_generator = {str(op) for op in ATEN if any("Generator" in str(arg.type) for arg in op._schema.arguments)}
    assert of_aten(Tag.RANDOM) == tagged | given_a_generator
    assert {"aten.rand.default", "aten.bernoulli_.float", "aten.native_dropout.default"} <= of_aten(Tag.RANDOM)


def test_an_operator_that_mutates_is_no_view():
    assert of_aten(Tag.VIEW) & of_aten(Tag.MUTATES) == set()


def test_views_share_memory_with_their_first_tensor_alone():
    for op in ATEN:
        if Tag.VIEW in tags_of(op) and str(op) != "aten.select.t":  # of a list, in scripts only
            tensors = [arg for arg in op._schema.arguments if "Tensor" in str(arg.type)]
            assert [arg for arg in op._schema.arguments if arg.alias_info] == tensors[:1], op


def test_known_views_are_views():
    views = {"aten.view.default", "aten.reshape.default", "aten.expand.default", "aten.split.Tensor", "aten.t.default"}
    views |= {"aten.unbind.int", "aten.detach.default", "aten.slice.Tensor", "aten.squeeze.dims", "aten.alias.default"}
    assert views <= of_aten(Tag.VIEW)
    assert of_aten(Tag.VIEW).isdisjoint({"aten.clone.default", "aten._to_copy.default", "aten.cat.default"})


def test_products_convolutions_and_attention_are_compute_bound():
    bound = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.convolution_backward.default"}
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    bound |= {f"{attention}.default", f"{attention}_backward.default"}
    assert bound <= of_aten(Tag.COMPUTE_BOUND)
    assert of_aten(Tag.COMPUTE_BOUND).isdisjoint({"aten.mul.Tensor", "aten.sum.default", "aten._softmax.default"})


def test_aten_operators_called_for_their_effect_alone_are_opaque():
    silent = {str(op) for op in ATEN if not op._schema.returns and not op._schema.is_mutable}
    assert of_aten(Tag.OPAQUE) == silent
    assert "aten._assert_async.msg" in silent


def test_an_operator_that_makes_only_a_script_object_is_opaque():
    assert tags_of(torch.ops.profiler._record_function_enter_new.default) == {Tag.OPAQUE}


def test_collectives_and_their_wait_are_told_apart():
    functional = torch.ops._c10d_functional
    for op in overloads(functional) + overloads(torch.ops.c10d_functional):
        wait = "wait_tensor" in str(op)
        assert ({Tag.COLLECTIVE, Tag.WAIT} & tags_of(op)) == {Tag.WAIT if wait else Tag.COLLECTIVE}
    assert Tag.MUTATES in tags_of(functional.all_reduce_.default)
    assert Tag.OPAQUE not in tags_of(functional.all_reduce.default)


def test_higher_order_operators_and_python_functions_are_opaque():
    for target in (torch.ops.higher_order.cond, torch.ops.higher_order.flex_attention, print, torch.sin, object()):
        assert tags_of(target) == {Tag.OPAQUE}


@pytest.mark.parametrize("name", ["iadd", "iand", "ior", "imatmul", "setitem", "delitem"])
def test_in_place_functions_of_the_operator_module_are_opaque(name):
    assert tags_of(getattr(operator, name)) == {Tag.OPAQUE}


@pytest.mark.parametrize(
    "function",
    [operator.getitem, operator.mul, operator.invert, operator.is_not, math.floor, torch.sym_max],
    ids=lambda fn: fn.__name__,
)
def test_functions_on_numbers_have_no_tags(function):
    assert tags_of(function) == frozenset()


@pytest.fixture(scope="module")
def library():
    with torch.library._scoped_library("jointtrace_tests", "DEF") as found:
        found.define("pure(Tensor x) -> Tensor")
        found.define("write(Tensor(a!) x, Tensor(b!)? y, Tensor z) -> ()")
        found.define("write_all(Tensor(a!)[] xs, *, Tensor(b!) out) -> Tensor(b!)")
        found.define("look(Tensor(a) x) -> Tensor(a)")
        found.define("draw(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        found.define("log(Tensor x) -> ()")
        yield torch.ops.jointtrace_tests


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("pure", set()),
        ("write", {Tag.MUTATES}),
        ("write_all", {Tag.MUTATES}),
        ("look", {Tag.VIEW}),
        ("draw", {Tag.RANDOM}),
        ("log", {Tag.OPAQUE}),
    ],
)
def test_custom_operators_have_the_tags_of_their_schema(library, name, tags):
    assert tags_of(getattr(library, name).default) == tags


def test_writes_are_the_values_at_the_written_arguments():
    x, y, z = Var("x"), Var("y"), Var("z")
    assert writes_of(aten.add_.Tensor, (x, y), {}) == ("x",)
    assert writes_of(aten.add.out, (x, y), {"out": z}) == ("z",)
    assert writes_of(aten.add.Tensor, (x, y), {}) == ()
    assert writes_of(aten._foreach_add_.Scalar, ([x, y, x], 1), {}) == ("x", "y")
    assert writes_of(operator.mul, (x, y), {}) == ()


def test_writes_of_a_custom_operator_follow_its_schema(library):
    x, y, z = Var("x"), Var("y"), Var("z")
    assert writes_of(library.write.default, (x, None, z), {}) == ("x",)
    assert writes_of(library.write.default, (x,), {"y": y, "z": z}) == ("x", "y")
    assert writes_of(library.write_all.default, ([x, y],), {"out": z}) == ("x", "y", "z")


def test_attention_without_dropout_draws_no_random_numbers():
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not is_random(attention, (), {})
    assert not is_random(attention, (1, 2, 3, 0.0), {})
    assert is_random(attention, (1, 2, 3, 0.1), {})
    assert is_random(attention, (1, 2, 3), {"dropout_p": 0.5})
    assert is_random(torch.ops.aten.rand.default, ([2],), {})
