"""cli: the command `jointtrace`."""
from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jointtrace import __version__
from jointtrace.errors import JointtraceError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A joint forward-backward trace compiler for PyTorch and lightning-thunder."""
    warnings.filterwarnings("ignore", "transformer_engine module not found")  # thunder, at every import


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the traces, the table and the loss curves.")] = Path(
        "jointtrace-demo"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Training steps of every variant.")] = 30,
    executor: Annotated[
        str | None, typer.Option(help="What runs the regions: torch_compile or eager; by default what works here.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 4,
) -> None:
    """Train a small Llama with eager PyTorch, torch.compile, thunder and jointtrace, and compare them."""
    from jointtrace.demo import run

    try:
        code = run(out, steps, executor, layers)
    except JointtraceError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


@app.command()
def report(
    model: Annotated[
        str, typer.Argument(help="llama, gpt2, vit or mlp, or module.path:function that returns (module, inputs).")
    ],
    memory_budget: Annotated[
        str | None,
        typer.Option(help="Budgets to compare, as 0,0.25,0.5,0.75,1 or 800MiB,1; without it one compilation is shown."),
    ] = None,
    frontend: Annotated[str, typer.Option(help="torch.compile or thunder.")] = "torch.compile",
    executor: Annotated[
        str | None, typer.Option(help="What runs the regions: torch_compile or eager; by default what works here.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers, of a model given by name.")] = 4,
    output: Annotated[Path, typer.Option(help="Folder for the timelines, the table and the plot.")] = Path(
        "jointtrace-report"
    ),
) -> None:
    """Show where a model's memory goes, or what a smaller budget of memory costs in time."""
    from jointtrace.demo import report as run_report

    sys.path.insert(0, os.getcwd())  # a console script does not look for modules there
    try:
        run_report(model, memory_budget, frontend, executor, layers, output)
    except JointtraceError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def doctor() -> None:
    """Say what is installed, which repairs of thunder are in force, and which executors can run here."""
    from jointtrace.doctor import doctor as examine_and_print

    raise typer.Exit(examine_and_print(Console()))
