"""Faults planted in the joint build: each of them fails a check, which passes without it.

The checks are three: a program compared with eager PyTorch, check mode, which says where it went wrong, and the
verifier. Only what is kept in memory is counted by itself: the results are right with it.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from checking.planting import compiled_by
from joint.test_build import recomputed, saved
from numerics.oracle import assert_like_eager, jit, leaf, weighted_sum

from jointtrace.errors import CheckError, UnsupportedError, VerifyError
from jointtrace.frontends import thunder_jit
from jointtrace.ir.op import Op, Phase, Var
from jointtrace.joint import build, expand
from jointtrace.joint.alias import Aliases
from jointtrace.joint.build import Walk
from jointtrace.joint.expand import Get, Put, call_key


def like_eager(program, *args):
    assert_like_eager(program, *args)


def in_check_mode(program, *args):
    weighted_sum(compiled_by("thunder", program)(*args)).backward()


def arguments_alone_are_kept(program, *args):
    assert saved(assert_like_eager(program, *args)) == ["x"]


@dataclass(frozen=True)
class Fault:
    """A wrong joint build, a program on which it shows, and what notices it."""

    plant: Callable[[pytest.MonkeyPatch], None]
    program: Callable[..., Any]
    args: Callable[[], tuple[torch.Tensor, ...]]
    check: Callable[..., None] = like_eager
    noticed: type[Exception] = AssertionError


def steps_changed(change):
    """Change the backward of each expanded symbol."""

    def plant(monkeypatch):
        partition = expand._partition

        def changed(*args):
            forward, backward = partition(*args)
            return forward, tuple(change(list(backward)))

        monkeypatch.setattr(expand, "_partition", changed)

    return plant


def joint_changed(change):
    """Change what the build hands to the front end."""

    def plant(monkeypatch):
        monkeypatch.setattr(thunder_jit, "build_joint", lambda *args, **kw: change(build.build_joint(*args, **kw)))

    return plant


# the faults

def last_cotangent_alone(monkeypatch):
    monkeypatch.setattr(Walk, "accumulate", lambda self, name, grad: self.grads.update({name: self.fitted(grad, name)}))


def results_of_two_swapped(steps):
    gets = [step for step in steps if isinstance(step, Get)]
    if len(gets) != 2:
        return steps
    other = {gets[0].of: gets[1].of, gets[1].of: gets[0].of}
    return [Get(other[step.of], step.grad) if isinstance(step, Get) else step for step in steps]


def operands_of_two_swapped(steps):
    puts = [step for step in steps if isinstance(step, Put)]
    if len(puts) != 2:
        return steps
    other = {puts[0].to: puts[1].to, puts[1].to: puts[0].to}
    return [Put(other[step.to], step.grad) if isinstance(step, Put) else step for step in steps]


def wrong_value_kept(steps):
    """The backward reads one operand of the forward where it wants the other."""
    puts = [step.to for step in steps if isinstance(step, Put)]
    other = dict(zip(puts, puts[::-1], strict=True)) if len(puts) == 2 else {}
    return [step.rename_inputs(other) if isinstance(step, Op) else step for step in steps]


def first_put_lost(steps):
    puts = [step for step in steps if isinstance(step, Put)]
    return [step for step in steps if len(puts) < 2 or step is not puts[0]]


def phase_forgotten(steps):
    return [step.replace(phase=Phase.FW) if isinstance(step, Op) else step for step in steps]


def cotangents_of_other_positions(monkeypatch):
    seed = Walk.seed

    def wrong(self, name, position):
        seed(self, name, position)
        get_grad = next(op for op in reversed(self.ops) if op.target.name == "get_grad")
        self.ops[self.ops.index(get_grad)] = get_grad.replace(args=(Var(name), 1 - position))

    monkeypatch.setattr(Walk, "seed", wrong)


def writes_unseen_by_views(monkeypatch):
    monkeypatch.setattr(Aliases, "newest", lambda self, name: name)


def write_has_no_history(monkeypatch):
    monkeypatch.setattr(Aliases, "histories", lambda self: {})


def checkpoint_forgotten(monkeypatch):
    monkeypatch.setattr(Walk, "recomputed", lambda self, bsym: bsym)


def constants_not_in_the_key(monkeypatch):
    def key(bsym, names):
        return (bsym.sym, len(bsym.flat_args)), call_key(bsym, names)[1]

    monkeypatch.setattr(build, "call_key", key)


def another_for_a_missing_cotangent(monkeypatch):
    monkeypatch.setattr(Walk, "zeros", lambda self, name: next(iter(self.grads.values())))


def detach_lets_a_gradient_through(monkeypatch):
    let_nothing_through = Walk.let_nothing_through

    def through(self, bsym):
        let_nothing_through(self, bsym)
        if bsym.sym.name == "detach":
            self.aliases.link(bsym.output.name, self.name(bsym.args[0]))

    monkeypatch.setattr(Walk, "let_nothing_through", through)


def old_values_not_kept(monkeypatch):
    monkeypatch.setattr(build, "keep_overwritten", lambda trace: trace)


def shifted(joint):
    return replace(joint, differentiable=(*joint.differentiable[1:], joint.differentiable[0]))


def next_input(joint):
    grads = joint.trace.grads
    return replace(joint, trace=replace(joint.trace, grads=(*grads[1:], grads[0])))


# the programs

def fan_out(x):
    return x.sin() * x.cos() + x * x, x.exp()


def two_of_a_split(x):
    first, second = x.split(2)
    return first.sin() * second


def one_of_three(x):
    _, middle, _ = x.split(1)
    return middle.sin(), x.cos()


def written_through_a_view(x):
    y = x.sin()
    y[0].mul_(2)
    return y * 3


def written_argument(x, state):
    state.mul_(x)
    return state * 2


def overwritten(x):
    y = x.sin()
    y.mul_(x)
    return y


def under_a_checkpoint(x):
    return recomputed(lambda y: y.sin().exp().cos(), x)


FAULTS = {
    "a cotangent is dropped where a value is used several times": Fault(
        last_cotangent_alone, fan_out, lambda: (leaf(4),)),
    "cotangents of two results are swapped": Fault(
        steps_changed(results_of_two_swapped), two_of_a_split, lambda: (leaf(4),)),
    "gradients of two operands are swapped": Fault(
        steps_changed(operands_of_two_swapped), lambda x, y: x * y, lambda: (leaf(4), leaf(4))),
    "a gradient of an operand is lost": Fault(
        steps_changed(first_put_lost), lambda x, y: x * y, lambda: (leaf(4), leaf(4))),
    "a rule reads the wrong value that was kept": Fault(
        steps_changed(wrong_value_kept), lambda x, y: x * y, lambda: (leaf(4), leaf(4)), in_check_mode, CheckError),
    "a backward operation is marked as forward": Fault(
        steps_changed(phase_forgotten), lambda x: x.sin(), lambda: (leaf(4),), like_eager, VerifyError),
    "the cotangent of another output is read": Fault(
        cotangents_of_other_positions, lambda x: (x.sin(), x.exp()), lambda: (leaf(4),)),
    "a write is not seen by what was viewed": Fault(
        writes_unseen_by_views, written_through_a_view, lambda: (leaf(3, 2),)),
    "a written argument has no gradient history": Fault(
        write_has_no_history, written_argument, lambda: (leaf(4), torch.ones(4))),
    "a checkpoint keeps what it makes": Fault(
        checkpoint_forgotten, under_a_checkpoint, lambda: (leaf(4),), arguments_alone_are_kept),
    "the expansion of another constant is used": Fault(
        constants_not_in_the_key, lambda x: x * 2 + x.sin() * 3, lambda: (leaf(4),)),
    "a result that nobody uses has another one's cotangent": Fault(
        another_for_a_missing_cotangent, one_of_three, lambda: (leaf(3, 3),)),
    "detach is ignored": Fault(
        detach_lets_a_gradient_through, lambda x: x.detach() * x.sin(), lambda: (leaf(4),)),
    "a value is overwritten before the backward reads it": Fault(
        old_values_not_kept, overwritten, lambda: (leaf(4),), like_eager, UnsupportedError),
    "requires_grad is that of the next output": Fault(
        joint_changed(shifted), lambda x, y: (x.sin(), y.sin()), lambda: (leaf(4), torch.ones(4))),
    "a gradient goes to the next input": Fault(
        joint_changed(next_input), lambda x, y: x.sin() * y.exp(), lambda: (leaf(4), leaf(4)), in_check_mode,
        CheckError),
}


@pytest.fixture(autouse=True)
def _scripts_go_to(tmp_path, monkeypatch):
    monkeypatch.setenv("JOINTTRACE_DUMP", str(tmp_path))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_joint_build_is_noticed(fault, monkeypatch):
    fault.check(fault.program, *fault.args())
    fault.plant(monkeypatch)
    with pytest.raises(fault.noticed):
        fault.check(fault.program, *fault.args())


@pytest.mark.parametrize("used", [0, 1, 2])
def test_a_result_that_is_used_alone_gets_its_own_part_of_the_gradient(used):
    assert_like_eager(lambda x: x.unbind(0)[used].sin(), leaf(3, 4))


@pytest.mark.parametrize("uses", [2, 3, 9])
def test_all_uses_of_one_value_add_to_its_gradient(uses):
    def program(x):
        y = x.sin()
        return sum(y * (i + 1) for i in range(uses)) + y.exp(), y

    assert_like_eager(program, leaf(3))


def test_one_value_as_both_operands_gets_both_gradients():
    assert_like_eager(lambda x: (x.sin() * x.sin() + torch.atan2(x, x.exp()) + x @ x.t(), x.t() @ x), leaf(3, 3))


def test_nothing_is_kept_twice_for_the_backward():
    def program(x):
        y = x.sin()
        return y * y.exp() + y.view(-1).cos().view(x.shape), y.tanh()

    compiled = jit(program)
    x = leaf(64, 64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        compiled(x)
    assert len({t.untyped_storage().data_ptr() for t in kept}) == len(kept)


def test_what_was_kept_is_freed_by_the_backward():
    compiled, kept = jit(lambda x: x.sin().exp().tanh()), []
    out = compiled(leaf(64))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(weakref.ref(t)) or t, lambda t: t):
        out = compiled(leaf(64))
    out.sum().backward()
    del out
    assert kept
    assert all(reference() is None for reference in kept)
