"""Some generated programs through both front ends; `make fuzz` runs many more."""
from __future__ import annotations

import pytest
from conformance.fuzz.compare import judge
from conformance.fuzz.generate import programs
from conformance.fuzz.program import Form, Input, Line, Program
from conformance.fuzz.run import Batch, batches
from hypothesis import HealthCheck, Phase, given, settings

from jointtrace.joint.build import Walk

pytestmark = pytest.mark.filterwarnings("ignore")  # what generated programs make torch warn of
SLICE = 20
INPUT = Input((2, 3))


@pytest.mark.parametrize("frontend", ["thunder", "dynamo"])
def test_generated_programs_do_what_eager_does(frontend):
    batch = Batch(frontend, "eager", seed=0, programs=SLICE).run()
    assert not batch.failures, batch.failures[0]
    assert batch.tally["right"] + batch.tally["refused"] == SLICE
    assert batch.tally["refused"] <= 0.05 * SLICE, batch.refusals


@pytest.fixture(scope="module")
def many():
    found = []

    @settings(max_examples=150, database=None, derandomize=True, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(programs())
    def collect(program):
        found.append(program)

    collect()
    return [program.source(Form.RECORDED).split("def program")[1] for program in found], found


HAZARDS = {
    "checkpoint": "checkpoint(", "draw": "k0 =", "in place": "_(", "written part": "] *= ", "no_grad": "no_grad",
    "detach": "detach()", "custom function": "Product.apply", "several results": ".split(", "index": ".clamp(0, ",
    "cast": "float", "product": "@",
}


@pytest.mark.parametrize("hazard", HAZARDS)
def test_generated_programs_hold_what_compilers_get_wrong(many, hazard):
    texts, _ = many
    assert sum(HAZARDS[hazard] in text for text in texts) >= len(texts) // 50


def test_some_arguments_are_repeated_and_some_outputs_have_no_cotangent(many):
    _, found = many
    assert any(len(set(p.arguments)) < len(p.arguments) for p in found)
    assert any("" in p.cotangents and any(p.cotangents) for p in found)
    assert any(i.history for p in found for i in p.inputs)
    assert any(not i.requires_grad for p in found for i in p.inputs)


def program(text, cotangents=("plain",), smooth=False, replayed=None):
    line = Line(text, replayed)
    records = ("k0",) if "k0" in text else ()
    return Program((INPUT,), (0,), (line,), ("v1",), records, cotangents, smooth)


def test_a_program_runs_in_eager_with_the_numbers_a_compiled_one_drew():
    text = "v1 = F.dropout(a0.sigmoid() + 0.5, 0.5)\nk0 = v1.ne(0)"
    replayed = "v1 = (a0.sigmoid() + 0.5) * DRAWS[0] / (1 - 0.5)\nk0 = v1.ne(0)"
    assert judge(program(text, replayed=replayed), "thunder").kind == "right"


def test_a_program_that_draws_in_secret_is_compared_with_its_own_differences():
    assert judge(program("v1 = F.dropout(a0.sigmoid(), 0.5)", smooth=True), "thunder").kind == "right"


def test_what_is_not_supported_counts_as_refused():
    verdict = judge(program("v1 = F.alpha_dropout(a0, 0.5, True)", smooth=True), "thunder")
    assert verdict.kind == "refused"
    assert "draws random numbers" in verdict.why


def test_what_eager_does_not_run_counts_as_invalid():
    assert judge(program("v1 = a0.sigmoid()\nv1.mul_(2)"), "thunder").kind == "invalid"


def dropped(self, name, grad):
    self.grads[name] = self.fitted(grad, name)


def test_a_wrong_gradient_is_found_made_small_and_printed_as_a_script(monkeypatch, python):
    monkeypatch.setattr(Walk, "accumulate", dropped)
    monkeypatch.setattr("conformance.fuzz.run.LINES", 3)  # making a program smaller takes long
    monkeypatch.setattr("conformance.fuzz.run.FAILURES", 1)
    batch = Batch("thunder", "eager", seed=1, programs=40).run()
    assert batch.failures
    message, script = batch.failures[0].split("import jointtrace", 1)
    assert "gradient of input" in message or "the slope" in message
    assert script.count("\n    v") <= 3
    assert "tensor" in python("import jointtrace" + script).stdout


def test_one_seed_gives_the_same_programs_and_half_go_through_each_front_end():
    first, again = ([*batches(101, 3, ("thunder", "dynamo"), 10)] for _ in range(2))
    assert [vars(b) for b in first] == [vars(b) for b in again]
    assert sum(b.programs for b in first if b.frontend == "thunder") == 51
    assert sum(b.programs for b in first) == 101
    assert len({b.seed for b in first}) == len(first)
