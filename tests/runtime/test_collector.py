import gc

import pytest

from jointtrace.runtime.collector import paused_collector


@pytest.fixture(autouse=True)
def _enabled_again():
    yield
    gc.enable()


def test_nothing_is_collected_meanwhile():
    with paused_collector():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()


def test_the_collector_is_back_after_an_error():
    with pytest.raises(ZeroDivisionError), paused_collector():
        raise ZeroDivisionError
    assert gc.isenabled()
