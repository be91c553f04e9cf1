"""Train a model of the zoo compiled and in eager PyTorch, and measure how far the gradients are apart.

A gradient's error is the largest difference over the largest value of eager's gradient of the same parameter, the
latter taken as at least a thousandth of the model's largest gradient: the bias of attention keys has the gradient 0,
and what eager gives for it is rounding.
"""
from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jointtrace  # isort: skip  # before thunder, which it makes importable

import thunder
import torch
from conformance.models.zoo import Batch, Model
from transformers.models.t5.modeling_t5 import T5Attention

PLAIN, CHECKPOINTED, AUTOCAST = MODES = ("f32", "checkpointing", "bf16 autocast")
DYNAMO, THUNDER = FRONT_ENDS = ("Dynamo", "thunder")
STEPS = 2
LEARNING_RATE = 0.1
SMALLEST_SCALE = 1e-3

# float32 carries 6e-8; two layers, forward and backward, sum in another order where a compiler fuses or recomputes.
TOLERANCE = 1e-5
# Both round to bfloat16 in places, and a sum taken in another order rounds elsewhere: neither is the truth, so both are
# compared with the float32 gradients. Over the whole model such noise averages out; one small tensor may have bad luck,
# by a few roundings (2**-8 each).
FURTHER_THAN_EAGER, FURTHER_IN_ONE_TENSOR, ROUNDINGS = 1.1, 2.0, 2 * 2.0**-8

Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Step:
    """What one training step leaves behind."""

    loss: torch.Tensor
    gradients: Gradients
    buffers: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Result:
    """How far compiled training is from eager's.

    Attributes:
        error: largest error of a gradient, in bf16 autocast that against float32.
        eager_error: the same of eager PyTorch in bf16 autocast; else 0.
        saved_bytes: what the compiled forward keeps for the backward.
        faults: what is not as it must be, in words.
    """

    error: float
    eager_error: float
    saved_bytes: int
    faults: list[str] = field(default_factory=list)


def supports(module: Any, mode: str) -> bool:
    """Say whether transformers has `mode` for a model."""
    return mode != CHECKPOINTED or module.supports_gradient_checkpointing


def train_both(model: Model, mode: str, front_end: str, executor: str = "eager") -> Result:
    """Train `model` compiled and eagerly for two steps from the same weights and batches, and compare."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = model.make().train()
    batches = [model.batch() for _ in range(STEPS)]
    eager, ours = copy.deepcopy(plain), copy.deepcopy(plain)
    if mode == CHECKPOINTED:
        _enable_checkpointing(eager)
        _enable_checkpointing(ours)
    compiled = _compiled(ours, front_end, executor)
    with _checkpoints_drop_side_effects():
        expected = _train(eager, eager, batches, autocast=mode == AUTOCAST)
        found = _train(compiled, ours, batches, autocast=mode == AUTOCAST)
    faults, saved_bytes = _faults_of_compilation(compiled)
    if mode == AUTOCAST:
        truth = _train(plain, plain, batches[:1], autocast=False)[0].gradients
        mine, theirs = found[0].gradients, expected[0].gradients
        faults += beyond_rounding(mine, theirs, truth)
        return Result(largest_error(mine, truth), largest_error(theirs, truth), saved_bytes, faults)
    errors = []
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True), start=1):
        errors.append(largest_error(mine.gradients, theirs.gradients))
        faults += [f"step {number}: {fault}" for fault in differences(mine, theirs)]
    return Result(max(errors), 0.0, saved_bytes, faults)


def largest_error(found: Gradients, expected: Gradients) -> float:
    """Return the largest error of a gradient."""
    return max(_errors(found, expected).values())


def _enable_checkpointing(module: Any) -> None:
    module.activation_checkpointing_enable()
    module.disable_input_require_grads()  # for frozen embeddings: thunder does not know Tensor.requires_grad_
    for part in module.modules():
        if isinstance(part, T5Attention):
            part.gradient_checkpointing = False  # only sets requires_grad of zeros, which Dynamo refuses


@contextlib.contextmanager
def _checkpoints_drop_side_effects() -> Iterator[None]:
    """Let Dynamo trace a checkpoint that collects router logits: the forward's are kept, none collected again."""
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        yield


def _compiled(module: Any, front_end: str, executor: str) -> Any:
    options = {"executors": (executor,)}
    if front_end == THUNDER:
        return thunder.jit(module, delay_trace_split=True, jointtrace=options)
    return torch.compile(module, backend="jointtrace", fullgraph=True, options=options)


def _train(fn: Callable[..., Any], owner: torch.nn.Module, batches: list[Batch], *, autocast: bool) -> list[Step]:
    optimizer = torch.optim.SGD(owner.parameters(), lr=LEARNING_RATE)
    steps = []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = fn(**batch).loss
        loss.backward()
        gradients = {name: p.grad if p.grad is None else p.grad.clone() for name, p in owner.named_parameters()}
        optimizer.step()
        buffers = dict((fn if isinstance(fn, thunder.ThunderModule) else owner).named_buffers())
        steps.append(Step(loss.detach(), gradients, {name: buffer.clone() for name, buffer in buffers.items()}))
    return steps


def _faults_of_compilation(compiled: Any) -> tuple[list[str], int]:
    report = jointtrace.report(compiled)
    faults = [] if len(report.compilations) == 1 else [f"compiled {len(report.compilations)} times"]
    faults += [f"region {region.name} never ran" for region in report.regions if not region.calls]
    return faults, report.saved_bytes


def differences(found: Step, expected: Step) -> Iterator[str]:
    """Yield what differs by more than the tolerance."""
    yield from _missing(found.gradients, expected.gradients)
    apart = {f"gradient of {name}": e for name, e in _errors(found.gradients, expected.gradients).items()}
    pairs = {"loss": (found.loss, expected.loss)}
    pairs |= {f"buffer {name}": (found.buffers[name], buffer) for name, buffer in expected.buffers.items()}
    for name, (mine, theirs) in pairs.items():
        mine, theirs = mine.double(), theirs.double()
        apart[name] = float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1.0))
    yield from (f"{name} differs by {error:.1e}" for name, error in apart.items() if not error <= TOLERANCE)


def beyond_rounding(found: Gradients, expected: Gradients, truth: Gradients) -> Iterator[str]:
    """Yield where gradients in autocast are further from those in float32 than eager's are."""
    yield from _missing(found, expected)
    far, eager_far = _distance(found, truth), _distance(expected, truth)
    if not far <= FURTHER_THAN_EAGER * eager_far:
        yield f"the gradient is {far:.2e} from float32, eager's {eager_far:.2e}"
    errors, eager_errors = _errors(found, truth), _errors(expected, truth)
    for name, error in errors.items():
        if not error <= FURTHER_IN_ONE_TENSOR * eager_errors[name] + ROUNDINGS:
            yield f"gradient of {name} is {error:.1e} from float32, eager's {eager_errors[name]:.1e}"


def _missing(found: Gradients, expected: Gradients) -> Iterator[str]:
    for name, theirs in expected.items():
        if (found[name] is None) != (theirs is None):
            yield f"gradient of {name} is {'missing' if found[name] is None else 'there'}, unlike eager's"


def _pairs(found: Gradients, expected: Gradients) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    both = {name: (found[name], theirs) for name, theirs in expected.items()}
    return {name: (a, b) for name, (a, b) in both.items() if a is not None and b is not None}


def _errors(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Return the error of each gradient."""
    pairs = _pairs(found, expected)
    smallest = SMALLEST_SCALE * max(float(theirs.abs().max()) for _, theirs in pairs.values())
    return {name: float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=smallest))
            for name, (mine, theirs) in pairs.items()}


def _distance(found: Gradients, expected: Gradients) -> float:
    """Return how far the gradient as one vector is from the expected one, relative to its length."""
    pairs = list(_pairs(found, expected).values())
    apart = sum(float((mine - theirs).double().square().sum()) for mine, theirs in pairs)
    return (apart / sum(float(theirs.double().square().sum()) for _, theirs in pairs)) ** 0.5
