"""The command `jointtrace report`: what a model's memory is spent on, and what a smaller budget of it costs in time."""
from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import thunder
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import jointtrace
from jointtrace.demo.measure import Memory, Quartiles, Step, interleave, memory, paired_ratio, quartiles
from jointtrace.demo.models import MODELS, build
from jointtrace.errors import OptionError, UnsupportedError
from jointtrace.executors.registry import resolve
from jointtrace.ir.op import Phase, Tag
from jointtrace.options import Budget
from jointtrace.pipeline import Stage
from jointtrace.reporting.memory import MemoryReport
from jointtrace.reporting.reasons import size

FRONT_ENDS = ("torch.compile", "thunder")
FASTEST = 1.0
ROUNDS = 10
NAMED = 3  # kinds of ops that the table names
WIDTH = 160


@dataclass(frozen=True)
class Settings:
    """What to compile, and how."""

    model: str
    front_end: str = "torch.compile"
    executor: str | None = None
    layers: int = 4
    rounds: int = ROUNDS


@dataclass(frozen=True)
class Row:
    """What one budget gives."""

    budget: Budget
    planned: MemoryReport
    measured: Memory | None
    step_ms: float
    ratio: Quartiles
    again: str

    @property
    def name(self) -> str:
        """The budget as a part of a file's name."""
        return str(self.budget.given).replace(" ", "")


def run(settings: Settings, budgets: str | None, out: Path, console: Console) -> None:
    """Report on one compilation, or compare budgets, given as numbers and sizes with commas between them.

    Raises:
        OptionError: an unknown model, front end, executor or budget; or what the model's function gives is no model.
        UnsupportedError: the model cannot be compiled, or no plan keeps a budget.
    """
    asked = None if budgets is None else _budgets(budgets)
    if settings.front_end not in FRONT_ENDS:
        raise OptionError(f"option frontend={settings.front_end!r}; accepted: {', '.join(FRONT_ENDS)}")
    resolve(None if settings.executor is None else (settings.executor,))
    module, inputs = load(settings.model, settings.layers)
    out.mkdir(parents=True, exist_ok=True)
    if asked is None:
        report_once(settings, module, inputs, out, console)
    else:
        rows = measure(settings, module, inputs, asked, console)
        write(settings, rows, out, console)


def load(name: str, layers: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a model and its inputs: one of the package's by name, or what the function `module.path:function` returns.

    Raises:
        OptionError: there is no such model, module or function, or it returns something else.
    """
    if name in MODELS:
        return build(name, layers, torch.float32)
    path, _, function = name.partition(":")
    if not function:
        raise OptionError(f"model {name!r}; accepted: {', '.join(MODELS)}, or module.path:function of your own, which "
                          "returns (module, inputs)")
    try:
        made = getattr(importlib.import_module(path), function)
    except ModuleNotFoundError as error:
        raise OptionError(f"model {name!r}: {error}; it is looked for where Python imports from, and in the current "
                          "folder") from error
    except AttributeError as error:
        raise OptionError(f"model {name!r}: {error}") from error
    pair = made()
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], nn.Module)):
        raise OptionError(f"model {name!r} returned {type(pair).__name__}; it must return (module, inputs), a torch "
                          "module and a tuple of its arguments")
    module, inputs = pair
    return module, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def report_once(settings: Settings, module: nn.Module, inputs: tuple[Any, ...], out: Path, console: Console) -> None:
    """Print the report of one compilation and write its timeline."""
    step = step_of(settings, module, inputs, None)
    step()
    report = jointtrace.report(step.model.compiled)  # type: ignore[attr-defined]
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    found = report.memory
    if found is None:
        return
    console.print(f"\n{found}", markup=False, highlight=False, soft_wrap=True)
    for suffix in ("html", "png"):
        found.save(out / f"memory.{suffix}")
    console.print(f"Timeline: {out / 'memory.html'}, {out / 'memory.png'}", soft_wrap=True)


class Loss:
    """A compiled model that returns a scalar: the sum of what it returns where that is none."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled

    def __call__(self, *inputs: Any) -> Tensor:
        results = self.compiled(*inputs)
        if isinstance(results, Tensor) and results.ndim == 0:
            return results
        from torch.utils._pytree import tree_leaves

        losses = [leaf.sum() for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not losses:
            raise UnsupportedError("nothing that the model returns has a gradient, so there is no step to report on")
        return torch.stack([loss.float() for loss in losses]).sum() if len(losses) > 1 else losses[0]


def step_of(settings: Settings, module: nn.Module, inputs: tuple[Any, ...], budget: Budget | None) -> Step:
    """Return a training step of `module`, compiled with a budget; it compiles when it first runs."""
    options: dict[str, Any] = {} if settings.executor is None else {"executors": (settings.executor,)}
    if budget is not None:
        options["memory_budget"] = budget.given
    if settings.front_end == "thunder":
        compiled = thunder.jit(module, delay_trace_split=True, jointtrace=options)
    else:
        compiled = torch.compile(module, backend="jointtrace", options=options, dynamic=False)
    tensors = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    return Step(Loss(compiled), (*module.parameters(), *tensors), inputs)


def measure(
    settings: Settings, module: nn.Module, inputs: tuple[Any, ...], budgets: Sequence[Budget], console: Console
) -> list[Row]:
    """Return a row for each budget; all steps are timed in turn."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    steps: dict[str, Step] = {}
    planned: dict[str, MemoryReport] = {}
    again: dict[str, str] = {}
    # each budget is a compilation of its own of the same code
    with torch._dynamo.config.patch(recompile_limit=8 * len(budgets)), Progress(*columns, console=console) as bar:
        task = bar.add_task("compiling", total=len(budgets) + 1)
        for budget in budgets:
            bar.update(task, description=f"compiling with budget {budget}")
            step = steps[str(budget)] = step_of(settings, copy.deepcopy(module), inputs, budget)
            step()
            report = jointtrace.report(step.model.compiled)  # type: ignore[attr-defined]
            if report.memory is None:
                raise UnsupportedError(f"with memory_budget={budget} the compilation did not finish")
            planned[str(budget)], again[str(budget)] = report.memory, computed_again(report.passes)
            bar.advance(task)
        bar.update(task, description="measuring")
        on_cpu = all(p.device.type == "cpu" for p in module.parameters())
        measured = {name: memory(step) if on_cpu else None for name, step in steps.items()}
        seconds = interleave(steps, settings.rounds)
        bar.advance(task)
    fastest = str(next(budget for budget in budgets if budget.fraction == FASTEST))
    return [Row(budget, planned[name], measured[name], 1e3 * quartiles(seconds[name]).median,
                paired_ratio(seconds[name], seconds[fastest]), again[name])
            for budget in budgets for name in (str(budget),)]


def computed_again(passes: Sequence[Stage]) -> str:
    """Say which forward ops the backward computes again, but for views."""
    stages = [stage for stage in passes if stage.name == "recompute"]
    if not stages:
        return "nothing"
    trace = stages[0].trace
    forward = {name for op in trace.ops if op.phase is Phase.FW for name in op.outs}
    copies = [op for op in trace.ops if op.phase is Phase.BW and op.outs and Tag.VIEW not in op.tags
              and all(name.startswith("bw_") and name.removeprefix("bw_").rstrip("_") in forward for name in op.outs)]
    if not copies:
        return "nothing"
    kinds = Counter(_short(op.target.name) for op in copies).most_common()
    named = ", ".join(f"{count} {name}" for name, count in kinds[:NAMED])
    return f"{len(copies)} ops: {named}" + (", …" if len(kinds) > NAMED else "")


def _short(name: str) -> str:
    parts = name.split(".")
    return parts[-2] if len(parts) > 2 and (parts[0] == "aten" or parts[-1] == "default") else parts[-1]


def write(settings: Settings, rows: Sequence[Row], out: Path, console: Console) -> None:
    """Print the table and write it, the plot, and a timeline for each budget."""
    table = table_of(settings, rows)
    console.print(table)
    with (out / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=WIDTH).print(table)
    plot(rows, out / "tradeoff.png")
    for row in rows:
        row.planned.save(out / f"budget-{row.name}.html")
    console.print(f"Plot: {out / 'tradeoff.png'}; timelines: {out / 'budget-*.html'}", soft_wrap=True, highlight=False)


def table_of(settings: Settings, rows: Sequence[Row]) -> Table:
    """Return the trade-off as a table; memory is what is alive besides parameters and other arguments."""
    arguments = size(rows[0].planned.argument_bytes)
    table = Table(title=f"{settings.model}, {settings.front_end} front end; memory besides {arguments} of arguments")
    headings = ("planned peak", "measured peak", "kept", "step, ms", f"/ budget {FASTEST:g}")
    table.add_column("budget")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("computed again")
    for row in rows:
        about = "~" if row.planned.notes else ""
        table.add_row(
            str(row.budget.given), about + size(row.planned.peak_bytes),
            size(row.measured.peak_bytes) if row.measured else "-", size(row.planned.kept_bytes),
            f"{row.step_ms:.1f}", f"{row.ratio.median:.3f}", row.again,
        )
    return table


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw step time over peak, with quartiles, a point a budget."""
    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    peaks = [(row.measured.peak_bytes if row.measured else row.planned.peak_bytes) / 2**20 for row in rows]
    ratios = [row.ratio for row in rows]
    spread = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
    axes.errorbar(peaks, [r.median for r in ratios], yerr=spread, fmt="o", color="#0072b2", capsize=3)
    places: dict[tuple[float, float], list[str]] = {}
    for row, peak in zip(rows, peaks, strict=True):
        near = next((p for p in places if abs(p[0] - peak) < 0.02 * max(peaks)), (peak, row.ratio.median))
        places.setdefault(near, []).append(str(row.budget.given))
    for place, names in places.items():
        axes.annotate(", ".join(names), place, xytext=(7, 7), textcoords="offset points")
    axes.set(xlabel="measured peak besides arguments, MiB" if rows[0].measured else "planned peak, MiB",
             ylabel=f"step time / that of budget {FASTEST:g}")
    axes.margins(0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})


def _budgets(text: str) -> list[Budget]:
    """Return the budgets in `text`, the fastest plan among them: it is what the others are compared with."""
    budgets = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            number = float(part)
        except ValueError:
            budgets.append(Budget.parse(part))
        else:
            budgets.append(Budget.parse(int(number) if number.is_integer() else number))
    if not any(budget.fraction == FASTEST for budget in budgets):
        budgets.append(Budget.parse(1))
    return list(dict.fromkeys(budgets))
