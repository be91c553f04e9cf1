"""run: trains every model of the zoo in every mode through both front ends, and writes the table to the README.

Exits with 1 where something is not as in eager PyTorch.
"""
from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import typer
from conformance.models.training import AUTOCAST, DYNAMO, MODES, PLAIN, THUNDER, Result, supports, train_both
from conformance.models.zoo import MODELS, THROUGH_THUNDER, Model
from transformers.utils import logging

README = Path(__file__).parents[3] / "README.md"
BEGIN, END = "<!-- models -->", "<!-- /models -->"
COLUMNS = [(DYNAMO, mode) for mode in MODES] + [(THUNDER, mode) for mode in MODES]
THROUGH_INDUCTOR = (("Llama", DYNAMO), ("Bert", DYNAMO), ("Llama", THUNDER))


def main() -> None:
    """Run everything, print as it goes, and write the README where all is well."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    faults: list[str] = []
    rows = [_row(model, faults) for model in MODELS]
    compiled = [_through_inductor(name, front_end, faults) for name, front_end in THROUGH_INDUCTOR]
    typer.echo("\n".join(faults) or "every model trains as in eager PyTorch")
    if not faults:
        _write(_table(rows), "; ".join(compiled))
    raise typer.Exit(bool(faults))


def _row(model: Model, faults: list[str]) -> list[str]:
    cells = [_cell(model, front_end, mode, faults) for front_end, mode in COLUMNS]
    return [model.name, *cells]


def _cell(model: Model, front_end: str, mode: str, faults: list[str]) -> str:
    if front_end == THUNDER and model.name not in THROUGH_THUNDER:
        return ""
    if not supports(model.make(), mode):
        return "not in transformers"
    result = _trained(model, mode, front_end, "eager", faults)
    if result is None:
        return "fails"
    return f"{result.error:.2g} / {result.eager_error:.2g}" if mode == AUTOCAST else f"{result.error:.2g}"


def _through_inductor(name: str, front_end: str, faults: list[str]) -> str:
    model = next(model for model in MODELS if model.name == name)
    result = _trained(model, PLAIN, front_end, "torch_compile", faults)
    return f"{name} ({front_end}) {result.error:.1e}" if result else f"{name} ({front_end}) fails"


def _trained(model: Model, mode: str, front_end: str, executor: str, faults: list[str]) -> Result | None:
    label = f"{model.name}, {mode}, {front_end}, {executor}"
    with _reported(label, faults):
        result = train_both(model, mode, front_end, executor)
        faults += [f"{label}: {fault}" for fault in result.faults]
        typer.echo(f"{label}: {result.error:.1e} {result.saved_bytes}")
        return result
    return None


@contextlib.contextmanager
def _reported(label: str, faults: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  one model that fails is one row
        faults.append(f"{label}: {type(error).__name__}: {str(error)[:1000]}")
        typer.echo(faults[-1])


def _table(rows: list[list[str]]) -> str:
    header = ["", *(f"{front_end}, {mode}" for front_end, mode in COLUMNS)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def _write(table: str, compiled: str) -> None:
    before, rest = README.read_text().split(BEGIN)
    after = rest.split(END)[1]
    text = f"{table}\n\nWith the `torch_compile` executor, f32: {compiled}."
    README.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    typer.run(main)
