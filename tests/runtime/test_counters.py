from __future__ import annotations

from jointtrace.runtime.counters import Counters


def test_calls_are_counted_by_name():
    counters = Counters()
    add = counters.counted("add", lambda a, b: a + b)
    counters.counted("other", abs)
    assert (add(1, 2), add(3, 4)) == (3, 7)
    assert counters.calls() == {"add": 2, "other": 0}


def test_what_never_ran_is_named():
    counters = Counters()
    counters.counted("ran", abs)(1)
    counters.counted("idle", abs)
    assert counters.never_ran() == ("idle",)


def test_boxed_calls_count_as_well():
    def fn(a):
        return -a

    fn.boxed = lambda args: -args.pop()
    counters = Counters()
    counted = counters.counted("fn", fn)
    assert (counted(1), counted.boxed([2])) == (-1, -2)
    assert counters.calls() == {"fn": 2}


def test_a_function_without_a_boxed_form_gets_none():
    assert not hasattr(Counters().counted("fn", abs), "boxed")


def test_counting_starts_again_after_a_reset():
    counters = Counters()
    counters.counted("fn", abs)(1)
    counters.reset()
    assert counters.calls() == {"fn": 0}
