import io
import json
import math
import os

import pytest
from harness import CACHE_VARIABLE, Figure, cold_cache, judge, machine, write_lines
from rich.console import Console


@pytest.mark.parametrize(("measured", "passed"), [(1.0, True), (1.05, True), (1.06, False), (math.nan, False)])
def test_a_figure_passes_up_to_its_limit(measured, passed):
    assert Figure("ratio", measured, 1.05).passed is passed


def test_the_verdict_stands_beside_the_figure_and_one_miss_fails_all():
    printed = Console(file=io.StringIO(), width=120)
    assert not judge([Figure("good", 1.0, 2.0), Figure("bad", 3.0, 2.0)], printed)
    text = printed.file.getvalue()
    good, bad = (next(line for line in text.splitlines() if name in line) for name in ("good", "bad"))
    assert "<= 2 x" in good
    assert "pass" in good
    assert "FAIL" in bad


def test_lines_are_appended_with_the_machine_in_each(tmp_path):
    path = tmp_path / "new" / "lines.jsonl"
    facts = machine()
    write_lines(path, facts, [{"variant": "eager"}], [Figure("ratio", 1.0, 2.0)])
    write_lines(path, facts, [{"variant": "floor"}], [])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("variant") for line in lines] == ["eager", None, "floor"]
    assert lines[1]["verdict"] == "pass"
    assert all(line["machine"]["threads"] == facts["threads"] for line in lines)


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_the_cold_cache_is_empty_and_leaves_the_setting_as_it_was(monkeypatch, before):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    if before:
        monkeypatch.setenv(CACHE_VARIABLE, before)
    with cold_cache():
        assert os.listdir(os.environ[CACHE_VARIABLE]) == []
    assert os.environ.get(CACHE_VARIABLE) == before
