"""`isomerge rebase TUNED --from BASE --onto NEW_BASE -o OUT`: a fine-tune or an adapter on another base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.choices import CORRECTIONS
from isomerge.cli.flags import Force, Level, OutDtype, Reading, Running, Threads, choice, option, switch
from isomerge.cli.merge import finished
from isomerge.cli.output import Record, Voice, as_record, listing, number
from isomerge.cli.report import add_report
from isomerge.cli.request import place_of, reserve_output
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb(
    "Carry a fine-tune or an adapter to another base.",
    "isomerge rebase finetuned --from base --onto new-base --data images.tar.xz -o rebased",
)
def rebase(
    tuned: Annotated[str, typer.Argument(metavar="TUNED", help="The fine-tune, or the folder of a LoRA adapter.")],
    *,
    out: Annotated[Path, option("OUT", "The folder to write, or an address (s3://, gs://).", "-o", "--out")],
    base: Annotated[str, option("BASE", "The base that TUNED was made from.", "--from")],
    onto: Annotated[str, option("NEW_BASE", "The base to carry it to: trained further, anew, or of another shape.")],
    scale: Annotated[float, option("NUMBER", "How much of the change is added.")] = 1.0,
    correction: Annotated[
        str,
        choice(
            "--correction",
            CORRECTIONS,
            "How the change is fitted on --data: by features, by signs of gradients, or not; features by default.",
        ),
    ] = "auto",
    level: Level = "full",
    ridge: Annotated[
        float | None, option("SHARE", "How strongly features hold the weights; by default chosen for each map.")
    ] = None,
    data: Annotated[
        Path | None, option("PATH", "Images or texts of the task; labels are not needed.", "--data")
    ] = None,
    reading: Reading,
    running: Running,
    threads: Threads = None,
    out_dtype: OutDtype = None,
    verify: Annotated[bool, switch("--verify/--no-verify", "Check the written model.")] = True,
    report: Annotated[bool, switch("--report/--no-report", "Write a model card and report.html.")] = True,
    force: Force = False,
    voice: Voice,
) -> None:
    """Add to NEW_BASE what TUNED has changed in BASE, moved by the alignment of the two bases.

    With --data the result is fitted to it without labels, and measured: how much of the skill has arrived.
    """
    read = {key: value for key, value in {**vars(reading), "length": running.length}.items() if value is not None}
    if read and data is None:
        raise RequestError(f"{', '.join(f'--{key}' for key in read)} has no effect without data. Add --data PATH.")
    if _is_adapter(tuned):
        given = {"--data": data, "--correction": correction != "auto", "--ridge": ridge, "--out-dtype": out_dtype}
        _rebase_adapter(tuned, base, onto, out, scale, level, given, running.device, report, force, voice)
        return
    reserve_output(out, [tuned, base, onto, *([str(data)] if data else [])], force=force, by_url=True)

    import isomerge

    with place_of(out, force=force) as place, voice.work("both") as progress:
        merged = isomerge.rebase(
            tuned, base, onto, scale=scale, correction=correction, level=level, ridge=ridge,
            data={"path": str(data), **read} if data else None, batch_size=running.batch_size, threads=threads,
            device=running.device, seed=running.seed, resume=place.folder, progress=progress,
        )  # fmt: skip
        written = merged.save(place.folder, out_dtype=out_dtype, force=force, report=report, finish=False)
        record = place.send(finished(merged, written, verify=verify, report=report), progress)
        written.finish()
    voice.show(record, rebase_table)


def _is_adapter(path: str) -> bool:
    if not (Path(path).expanduser() / "adapter_config.json").is_file():
        return False
    from isomerge.adapters import is_adapter

    return is_adapter(path)


def _rebase_adapter(
    adapter: str, base: str, onto: str, out: Path, scale: float, level: str, given: dict[str, Any], device: str,
    report: bool, force: bool, voice: Voice,
) -> None:  # fmt: skip
    if unused := [flag for flag, value in given.items() if value]:
        raise RequestError(
            f"{', '.join(unused)} is for models, and {adapter} is an adapter, whose factors are moved as they are. "
            f"Leave it out, or carry {base}+{adapter} as a model."
        )
    reserve_output(out, [adapter, base, onto], force=force)

    import isomerge
    from isomerge.reporting.adapter_report import write_adapter_report
    from isomerge.reporting.terminal import adapter_table

    with voice.work() as progress:
        carried = isomerge.rebase_adapter(
            adapter, base, onto, out, scale=scale, level=level, force=force, device=device, progress=progress
        )
        record = as_record(carried)
        if report:
            add_report(record, write_adapter_report(out, [adapter], {**record, "method": "rebase"}))
    voice.show(record, adapter_table)


def rebase_table(record: Record) -> RenderableType:
    """Where the models stand on held-out examples, if there are any, and what was written."""
    from rich.console import Group
    from rich.text import Text

    from isomerge.reporting.terminal import merge_table

    rows: list[dict[str, Any]] = record["rebased"].get("held_out", [])
    if not rows:
        return merge_table(record)
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "model"))
    table = listing("held-out examples", *columns, numbers=True)
    for row in rows:
        table.add_row(Text(row["model"]), *(number(row[key]) if key in row else "" for key in columns))
    return Group(table, merge_table(record))
