"""`isomerge distill A B … --student C --data PATH -o OUT`: many teachers into one student, without labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.choices import GOALS
from isomerge.cli.flags import Force, OutDtype, Reading, Running, choice, option, switch
from isomerge.cli.merge import finished
from isomerge.cli.output import Record, Voice, listing, number
from isomerge.cli.request import numbers, place_of, reserve_output
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb(
    "Train a student on its teachers' predictions.",
    "isomerge distill model-a model-b --student merged --data images.tar.xz -o student",
)
def distill(
    teachers: Annotated[list[str], typer.Argument(metavar="A B …", help="The teachers: folders, files or hub ids.")],
    *,
    out: Annotated[Path, option("OUT", "The folder to write, or an address (s3://, gs://).", "-o", "--out")],
    student: Annotated[
        str | None,
        option("MODEL", "Where to start: any model with the teachers' head and labels; the first teacher by default."),
    ] = None,
    fresh: Annotated[
        bool, switch("--fresh", "Start from random weights: the student's folder may hold a config.json alone.")
    ] = False,
    data: Annotated[
        list[Path] | None,
        option("PATH", "Images or texts; give it once for all teachers, or once per teacher, in order.", "--data"),
    ] = None,
    goals: Annotated[
        str,
        choice(
            "--goals", GOALS, "Whose predictions count: all teachers', each one's on its own data, or the posterior's."
        ),
    ] = "auto",
    weights: Annotated[str | None, option("LIST", "One number per teacher, as in 0.5,0.5; equal by default.")] = None,
    steps: Annotated[int, option("N", "Gradient steps, each on one batch.", min=1)] = 500,
    rate: Annotated[
        float | None, option("SHARE", "Size of the first steps, relative to a tensor's; 0.003, and 0.05 with --fresh.")
    ] = None,
    temperature: Annotated[float, option("T", "Divide all scores by this before they are compared.")] = 1.0,
    agree: Annotated[
        float | None,
        option("SHARE", "Choose the teachers' shares on each batch, none above this, so that none is contradicted."),
    ] = None,
    reading: Reading,
    running: Running,
    out_dtype: OutDtype = None,
    verify: Annotated[bool, switch("--verify/--no-verify", "Check the written model.")] = True,
    report: Annotated[bool, switch("--report/--no-report", "Write a model card and report.html.")] = True,
    force: Force = False,
    voice: Voice,
) -> None:
    """Draw a student to the predictions of its teachers by gradient steps. No labels are used.

    A run that was killed goes on from its last checkpoint when the same command is given again.
    """
    if not data:
        raise RequestError("distill runs the models on data. Add --data PATH.")
    paths = [*teachers, *([student] if student else [])]
    reserve_output(out, [*paths, *map(str, data)], force=force, by_url=True)
    settings = {**vars(reading), "length": running.length, "batch_size": running.batch_size}
    read = [{"path": str(path), **{k: v for k, v in settings.items() if v is not None}} for path in data]
    shares = numbers(weights, len(teachers)) if weights is not None else None

    import isomerge

    with place_of(out, force=force) as place, voice.work("both") as progress:
        merged = isomerge.distill(
            teachers, student, data=read[0] if len(read) == 1 else read, goals=goals, weights=shares, steps=steps,
            rate=rate, temperature=temperature, agree=agree, fresh=fresh, device=running.device, seed=running.seed,
            resume=place.folder, progress=progress,
        )  # fmt: skip
        written = merged.save(place.folder, out_dtype=out_dtype, force=force, report=report, finish=False)
        record = place.send(finished(merged, written, verify=verify, report=report), progress)
        written.finish()
    voice.show(record, distill_table)


def distill_table(record: Record) -> RenderableType:
    """Where the student, its teachers and their mean stand on held-out examples, and what was written."""
    from rich.console import Group
    from rich.text import Text

    from isomerge.reporting.terminal import merge_table

    rows: list[dict[str, Any]] = record["distilled"]["held_out"]
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "model"))
    table = listing("held-out examples", *columns, numbers=True)
    for row in rows:
        table.add_row(Text(row["model"]), *(number(row[key]) if key in row else "" for key in columns))
    return Group(table, merge_table(record))
