"""Some models of the zoo train as in eager PyTorch; `make models` runs all of them in every mode."""
from __future__ import annotations

import functools

import pytest
import torch
from conformance.models.training import (
    AUTOCAST,
    CHECKPOINTED,
    DYNAMO,
    PLAIN,
    THUNDER,
    Step,
    beyond_rounding,
    differences,
    train_both,
)
from conformance.models.zoo import MODELS

BY_NAME = {model.name: model for model in MODELS}
SLICE = (
    ("Llama", PLAIN, DYNAMO),
    ("Bert", AUTOCAST, DYNAMO),
    ("Mixtral", PLAIN, DYNAMO),
    ("ResNet", PLAIN, DYNAMO),
    ("ViT", PLAIN, THUNDER),
)


@functools.cache
def _trained(name, mode, front_end):
    return train_both(BY_NAME[name], mode, front_end)


@pytest.mark.parametrize(("name", "mode", "front_end"), SLICE)
def test_a_model_trains_as_in_eager_pytorch(name, mode, front_end):
    assert _trained(name, mode, front_end).faults == []


def test_gradient_checkpointing_keeps_less_and_changes_nothing():
    plain, checkpointed = (_trained("Llama", mode, DYNAMO) for mode in (PLAIN, CHECKPOINTED))
    assert checkpointed.faults == []
    assert checkpointed.saved_bytes < plain.saved_bytes / 2


def test_every_model_has_two_layers_or_more():
    for model in MODELS:
        config = model.make().config
        parts = [config, *(getattr(config, name) for name in config.sub_configs)]
        depths = [getattr(part, "num_hidden_layers", None) or getattr(part, "depths", None) for part in parts]
        assert all(depth is None or (depth if isinstance(depth, int) else min(depth)) >= 2 for depth in depths)
        assert any(depths)


def _step(**changed):
    facts = {"loss": torch.ones(()), "gradients": {"large": torch.ones(3), "small": torch.full((3,), 1e-4)},
             "buffers": {"mean": torch.ones(3)}}
    return Step(**{**facts, **changed})


def test_an_error_in_a_small_gradient_is_seen():
    wrong = _step(gradients={"large": torch.ones(3), "small": torch.zeros(3)})
    assert list(differences(wrong, _step())) == ["gradient of small differs by 1.0e-01"]


def test_a_missing_gradient_is_seen():
    wrong = _step(gradients={"large": torch.ones(3), "small": None})
    assert list(differences(wrong, _step())) == ["gradient of small is missing, unlike eager's"]
    assert list(differences(_step(), wrong)) == ["gradient of small is there, unlike eager's"]


def test_a_loss_that_is_no_number_and_a_buffer_that_stayed_are_seen():
    wrong = _step(loss=torch.tensor(torch.nan), buffers={"mean": torch.zeros(3)})
    assert list(differences(wrong, _step())) == ["loss differs by nan", "buffer mean differs by 1.0e+00"]


def test_gradients_further_from_float32_than_eagers_are_seen():
    truth = {"weight": torch.ones(3)}
    eager, near, far = ({"weight": torch.full((3,), value)} for value in (1.01, 0.99, 1.05))
    assert list(beyond_rounding(near, eager, truth)) == []
    assert len(list(beyond_rounding(far, eager, truth))) == 2
