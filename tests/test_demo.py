import csv
import io
import json
import math

import pytest
import torch
from rich.console import Console

from jointtrace.demo import compare, corpus
from jointtrace.demo.measure import FORWARD_DONE, Step, allocations, interleave, memory, paired_ratio, quartiles
from jointtrace.demo.model import Attention, Llama, LlamaConfig, rotary_tables, rotate
from jointtrace.demo.output import Row, progress_of, table_of
from jointtrace.demo.train import Trained, train
from jointtrace.errors import OptionError, UnsupportedError

TINY = LlamaConfig(vocabulary=corpus.VOCABULARY, width=32, layers=1, heads=4, kv_heads=2, hidden=48, context=16)


def console_of(**settings):
    return Console(file=io.StringIO(), width=160, **settings)


def row(variant="eager", worst_difference=0.0):
    return Row(variant, 2.5, worst_difference, 10.0, quartiles([1.0]), 2**20, 0.5, "")


# The text


def test_the_text_is_the_same_every_time_and_is_python_source():
    text = corpus.standard_library()
    assert torch.equal(text, corpus.standard_library())
    assert b"import " in bytes(text[:100_000].tolist())


def test_the_text_is_in_path_order_without_tests_and_installed_packages(tmp_path):
    for path in ("b.py", "a/x.py", "a/test/y.py", "site-packages/z.py", "c.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"<{path}>")
    assert bytes(corpus.standard_library(tmp_path).tolist()) == b"<a/x.py><b.py>"


def test_a_python_without_sources_is_named_in_the_error(tmp_path):
    with pytest.raises(UnsupportedError, match=str(tmp_path)):
        corpus.standard_library(tmp_path)


def test_targets_are_the_tokens_one_place_on():
    text = torch.arange(200, dtype=torch.uint8)
    for tokens, targets in corpus.batches(text, batch=3, context=8, steps=2, seed=0):
        assert tokens.shape == (3, 8)
        assert torch.equal(targets, tokens + 1)


def test_a_seed_fixes_the_batches():
    text = torch.arange(200, dtype=torch.uint8)
    draws = [[x.tolist() for x, _ in corpus.batches(text, 3, 8, 2, seed)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_a_text_shorter_than_one_sample_is_refused():
    with pytest.raises(UnsupportedError, match="8 bytes"):
        next(corpus.batches(torch.zeros(8, dtype=torch.uint8), 1, 8, 1, 0))


# The model


def test_rotation_depends_only_on_the_distance_of_two_positions():
    cos, sin = rotary_tables(context=16, head_width=8)
    q, k = torch.randn(2, 1, 8).unbind()
    scores = rotate(q.expand(16, 8), cos, sin) @ rotate(k.expand(16, 8), cos, sin).T
    torch.testing.assert_close(scores.diagonal(3), scores[0, 3].expand(13))


def test_query_heads_share_key_value_heads_in_groups():
    attention = Attention(TINY)
    x = torch.randn(2, TINY.kv_heads, 5, 8)
    assert torch.equal(attention.share(x), x.repeat_interleave(2, dim=1))


def test_attention_is_causal():
    attention = Attention(TINY)
    cos, sin = rotary_tables(TINY.context, 8)
    x = torch.randn(1, TINY.context, TINY.width)
    changed = x.clone()
    changed[:, 10:] += 1
    before, after = attention(x, cos, sin), attention(changed, cos, sin)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


# Training


def tiny_training(seed=0, compiler=lambda model: model):
    def build():
        torch.manual_seed(seed)
        return Llama(TINY)

    text = torch.tensor([7, 8] * 100, dtype=torch.uint8)
    data = corpus.batches(text, batch=4, context=TINY.context, steps=30, seed=0)
    return train("tiny", build, compiler, data, lambda name, loss: None)


def test_training_lowers_the_loss_and_repeats_exactly():
    trained = tiny_training()
    assert trained.losses[-1] < 0.9 * trained.losses[0]
    assert trained.losses == tiny_training().losses


def test_each_step_starts_without_gradients():
    left_over = []

    def watched(model):
        def call(*batch):
            left_over.extend(parameter for parameter in model.parameters() if parameter.grad is not None)
            return model(*batch)

        return call

    tiny_training(compiler=watched)
    assert not left_over


def test_another_start_is_another_curve():
    assert tiny_training(seed=1).worst_difference(tiny_training().losses) > compare.LOSS_TOLERANCE


@pytest.mark.parametrize(("losses", "worst"), [((2.2, 1.0), 0.1), ((2.0, 1.0), 0.0), ((math.nan, 1.0), math.inf)])
def test_the_worst_difference_is_relative_and_over_all_steps(losses, worst):
    assert Trained("x", None, (), losses, 0.0).worst_difference((2.0, 1.0)) == pytest.approx(worst)


# Measuring


def test_steps_take_turns_and_the_first_round_is_dropped():
    calls = []
    seconds = interleave({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=2)
    assert "".join(calls) == "abc" "bca" "cab"
    assert [len(sample) for sample in seconds.values()] == [2, 2, 2]


def test_a_block_repeats_its_step():
    calls = []
    interleave({"a": lambda: calls.append("a")}, rounds=3, repeats=5)
    assert len(calls) == 4 * 5


def test_ratios_are_taken_pair_by_pair():
    ratio = paired_ratio([2.0, 20.0, 300.0], [1.0, 10.0, 100.0])
    assert (ratio.low, ratio.median, ratio.high) == (2.0, 2.0, 2.5)


def test_memory_counts_what_the_backward_needs_and_the_most_at_any_time():
    weight = torch.ones(2**18, requires_grad=True)
    step = Step(lambda: (weight * 2).sin().cos().sum(), (weight,), ())
    step()
    space = memory(step)
    assert space.kept_bytes == pytest.approx(2 * 2**20, abs=1024), "sin and cos keep their operands, 2 * weight nothing"
    assert space.peak_bytes >= 3 * 2**20


def test_memory_sees_what_no_operator_of_autograd_saved():
    weight = torch.ones(8, requires_grad=True)
    hidden = []

    def model():
        hidden.append(torch.empty(2**20, dtype=torch.uint8))
        return weight.sum()

    assert memory(Step(model, (weight,), ())).kept_bytes == pytest.approx(2**20, abs=1024)


def test_allocations_are_the_only_events_that_change_the_level():
    with torch.profiler.profile(profile_memory=True) as profiler, torch.profiler.record_function(FORWARD_DONE):
        kept = torch.ones(256)
    changes = allocations(profiler)
    assert (FORWARD_DONE, 0) in changes
    assert sum(change for _, change in changes) == kept.nbytes


# What is shown


def test_off_a_terminal_progress_is_lines():
    console = console_of()
    with progress_of(console, 12) as progress:
        for _ in range(12):
            progress("eager", 2.5)
    assert console.file.getvalue().splitlines() == ["eager: step 1, loss 2.5000", "eager: step 10, loss 2.5000"]


def test_on_a_terminal_progress_is_a_bar():
    console = console_of(force_terminal=True)
    with progress_of(console, 2) as progress:
        progress("eager", 2.5)
        progress("eager", 2.25)
    assert "2/2" in console.file.getvalue()
    assert "eager: loss 2.2500" in console.file.getvalue()


def test_the_table_of_all_variants_names_each_in_80_columns():
    console = Console(file=io.StringIO(), width=80)
    console.print(table_of("title", [row(name) for name in compare.contest(None, None).compilers], {}))
    words = console.file.getvalue().replace("\u2503", " ").split()
    assert {"eager", "torch.compile", "thunder", "(thunder)", "(torch.compile)"} <= set(words)


def test_the_table_says_why_a_variant_did_not_run():
    console = console_of()
    console.print(table_of("title", [row()], {"torch.compile": "not available: no C++ compiler"}))
    assert "torch.compile: not available: no C++ compiler" in " ".join(console.file.getvalue().split())


def test_a_curve_that_leaves_eagers_fails_by_name():
    console = console_of()
    assert compare.verdict([row(), row("thunder", 2e-4)], console) == 1
    assert "FAILED: the losses of thunder differ from eager's by 2.0e-04" in console.file.getvalue()
    assert compare.verdict([row(), row("thunder", 0.5e-4)], console) == 0


# What runs


def test_with_a_compiler_our_regions_go_through_inductor():
    entrants = compare.contest(None, None)
    assert list(entrants.compilers) == [
        "eager", "torch.compile", "thunder", "jointtrace (thunder)", "jointtrace (torch.compile)"
    ]
    assert entrants.executor == "torch_compile"


def test_without_a_compiler_ours_runs_eagerly_and_torch_compile_is_named_absent():
    entrants = compare.contest(None, "no C++ compiler found")
    assert list(entrants.compilers) == ["eager", "thunder", "jointtrace (thunder)", "jointtrace (torch.compile)"]
    assert entrants.executor == "eager"
    assert entrants.absent == {
        "torch.compile": "not available, so jointtrace runs its regions eagerly: no C++ compiler found"
    }


def test_an_unknown_executor_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(OptionError, match="'inductor'; known: torch_compile"):
        compare.run(tmp_path / "out", steps=1, executor="inductor", layers=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("numbers", [{"steps": 0, "layers": 1}, {"steps": 1, "layers": 0}])
def test_numbers_below_one_are_refused(tmp_path, numbers):
    with pytest.raises(OptionError, match="=0; accepted: 1 and more"):
        compare.run(tmp_path, executor="eager", **numbers)


def test_the_demo_compares_and_writes_everything(tmp_path):
    whole = compare.contest("eager", "compiled variants are left out to be quick")
    out = tmp_path / "new" / "folder"
    settings = compare.Settings(steps=2, model=TINY, batch=2, timing_rounds=2)
    console = console_of()
    assert compare.compare(out, settings, whole, console) == 0, console.file.getvalue()
    written = {str(path.relative_to(out)): path.stat().st_size for path in out.rglob("*") if path.is_file()}
    folders = ("jointtrace_thunder", "jointtrace_torch_compile")
    traces = {f"{folder}/{name}.txt" for folder in folders for name in ("joint", "forward", "backward", "report")}
    assert set(written) == {*traces, "table.txt", "table.json", "losses.csv", "losses.png"}
    assert all(written.values())
    assert "torch.matmul" in (out / "jointtrace_thunder" / "joint.txt").read_text()
    assert "aten.mm.default" in (out / "jointtrace_torch_compile" / "joint.txt").read_text()
    with (out / "losses.csv").open() as file:
        assert [len(line) for line in csv.reader(file)] == [5, 5, 5]
    table = json.loads((out / "table.json").read_text())
    assert [variant["variant"] for variant in table["variants"]] == [
        "eager", "thunder", "jointtrace (thunder)", "jointtrace (torch.compile)"]
    for ours in table["variants"][2:]:
        assert ours["kept_bytes"] > 0
        assert "calls" in ours["regions"]
