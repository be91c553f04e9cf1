"""Train the same model in every way from the same seed on the same text, measure, and write down what came out."""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import jointtrace
from jointtrace.demo import corpus, variants
from jointtrace.demo.measure import Step, interleave, memory, paired_ratio, quartiles
from jointtrace.demo.model import Llama, LlamaConfig
from jointtrace.demo.output import Row, progress_of, table_of, write_losses, write_table, write_traces
from jointtrace.demo.train import Batch, Trained, train
from jointtrace.errors import OptionError
from jointtrace.executors.registry import resolve

SEED = 0
LOSS_TOLERANCE = 1e-4
"""Largest relative difference of a loss from eager's that still counts as the same curve (float32, tens of steps)."""


@dataclass(frozen=True)
class Settings:
    """How much to train and on how large a model."""

    steps: int
    model: LlamaConfig
    batch: int = 4
    timing_rounds: int = 10

    @property
    def title(self) -> str:
        sizes = self.model
        sample = f"batch {self.batch} x {sizes.context} bytes"
        return f"Llama: {sizes.layers} layers, width {sizes.width}, {sample}, {self.steps} steps"


@dataclass(frozen=True)
class Contest:
    """Which variants run, in order and eager first, what runs the regions of ours, and why the others do not run."""

    compilers: Mapping[str, Callable[[nn.Module], variants.Loss]]
    executor: str
    absent: Mapping[str, str] = field(default_factory=dict)


def run(out: Path, steps: int, executor: str | None, layers: int) -> int:
    """Run the demo and return its exit code: 0, or 1 where a loss curve leaves eager's.

    Args:
        out: folder for the traces, the table and the loss curves; made where it is missing.
        steps: training steps of every variant.
        executor: what runs jointtrace's regions; None takes `torch_compile` where a C++ compiler works, else `eager`.
        layers: layers of the model.

    Raises:
        OptionError: a number below 1, or an unknown executor.
        UnsupportedError: the executor cannot run on this machine; the message says why.
    """
    for name, value in (("steps", steps), ("layers", layers)):
        if value < 1:
            raise OptionError(f"option {name}={value}; accepted: 1 and more")
    if executor is not None:
        resolve((executor,))
    settings = Settings(steps, LlamaConfig(vocabulary=corpus.VOCABULARY, layers=layers))
    return compare(out, settings, contest(executor, variants.compiler_missing()), Console())


def contest(executor: str | None, missing: str | None) -> Contest:
    """Return the variants to run where `missing` says why no machine code can be compiled (None: it can)."""
    chosen = executor or ("eager" if missing else "torch_compile")
    compilers: dict[str, Callable[[nn.Module], variants.Loss]] = {
        variants.EAGER: lambda model: model,
        variants.TORCH_COMPILE: variants.torch_compile,
        variants.THUNDER: variants.plain_thunder,
        variants.OURS_BY_THUNDER: variants.by_thunder(chosen),
        variants.OURS_BY_TORCH_COMPILE: variants.by_torch_compile(chosen),
    }
    if missing is None:
        return Contest(compilers, chosen)
    del compilers[variants.TORCH_COMPILE]
    reason = f"not available, so jointtrace runs its regions eagerly: {missing}"
    return Contest(compilers, chosen, {variants.TORCH_COMPILE: reason})


def compare(out: Path, settings: Settings, entrants: Contest, console: Console) -> int:
    """Train and measure `entrants`, print the table, write everything to `out`, and return the exit code."""
    text = corpus.standard_library()
    console.print(f"{settings.title}; {len(text):,} bytes of Python's standard library")
    batches = list(corpus.batches(text, settings.batch, settings.model.context, settings.steps, SEED))
    trained = train_all(settings, entrants, batches, console)
    rows = measure_all(settings, trained, batches[-1])
    out.mkdir(parents=True, exist_ok=True)
    title = f"{settings.title}; executor of jointtrace's regions: {entrants.executor}"
    table = table_of(title, rows, entrants.absent)
    console.print(table)
    write_table(out, table, rows, entrants.absent, entrants.executor)
    write_losses(out, trained)
    for one in trained:
        if variants.is_ours(one.name):
            write_traces(out / folder_of(one.name), one.model)
    console.print(f"Traces, table and loss curves: {out}")
    return verdict(rows, console)


def train_all(settings: Settings, entrants: Contest, batches: list[Batch], console: Console) -> list[Trained]:
    """Train every entrant on the same batches from the same weights."""

    def build() -> nn.Module:
        torch.manual_seed(SEED)
        return Llama(settings.model)

    with progress_of(console, settings.steps * len(entrants.compilers)) as progress:
        return [train(name, build, compiler, batches, progress) for name, compiler in entrants.compilers.items()]


def measure_all(settings: Settings, trained: list[Trained], batch: Batch) -> list[Row]:
    """Time the trained variants against each other, account for their memory, and set their losses beside eager's."""
    eager = trained[0]
    steps = {one.name: Step(one.model, one.parameters, batch) for one in trained}
    seconds = interleave(steps, settings.timing_rounds)
    return [
        Row(
            variant=one.name,
            final_loss=one.losses[-1],
            worst_difference=one.worst_difference(eager.losses),
            step_ms=1e3 * quartiles(seconds[one.name]).median,
            ratio=paired_ratio(seconds[one.name], seconds[eager.name]),
            kept_bytes=memory(steps[one.name]).kept_bytes,
            first_call_s=one.first_call_s,
            regions=regions_of(one),
        )
        for one in trained
    ]


def folder_of(name: str) -> str:
    """Return the name of the folder for the traces of a variant: `jointtrace_thunder`, `jointtrace_torch_compile`."""
    return "_".join(re.findall(r"\w+", name))


def regions_of(one: Trained) -> str:
    """Say how many regions jointtrace made of the model and how often they ran."""
    if not variants.is_ours(one.name):
        return ""
    regions = jointtrace.report(one.model).regions
    return f"{len(regions)}, {sum(region.calls for region in regions)} calls"


def verdict(rows: list[Row], console: Console) -> int:
    """Say which loss curves leave eager's and return 1 where there is one."""
    apart = [row for row in rows if row.worst_difference > LOSS_TOLERANCE]
    for row in apart:
        console.print(f"FAILED: the losses of {row.variant} differ from eager's by {row.worst_difference:.1e} relative")
    if not apart:
        console.print(f"All loss curves equal eager's to {LOSS_TOLERANCE:g} relative at every step.")
    return 1 if apart else 0
