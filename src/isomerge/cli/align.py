"""`isomerge align SOURCE ANCHOR -o OUT`: write SOURCE moved next to ANCHOR, its function unchanged."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from isomerge.cli.common import (
    Debug,
    Device,
    Force,
    Json,
    Level,
    MaxMemory,
    Out,
    OutDtype,
    Quiet,
    Seed,
    ShardSize,
    Threads,
    Voice,
    choice,
    reserve_output,
    written_record,
)
from isomerge.cli.errors import announce_output
from isomerge.cli.report import add_report
from isomerge.errors import RequestError

PARTS = ("attention", "ffn", "residual")
MANY = ("anchor", "universe")
EVIDENCE = ("weights", "activations", "mix")
# Flags that change how the run speaks, or allow it to replace something, and nothing of what it makes.
MANNERS = ("json", "quiet", "debug", "force", "report")
# What a stored transform brings with it, so that these say nothing beside one.
SOLVING = ("level", "sweeps", "many", "nearest")


Source = Annotated[str, typer.Argument(metavar="SOURCE", help="The model to move: a folder, a file or a hub id.")]
Anchor = Annotated[str | None, typer.Argument(metavar="ANCHOR", help="The model to move it next to.")]
More = Annotated[list[str] | None, typer.Argument(metavar="MORE", help="Further models to move.")]
Scale = Annotated[
    bool | None, typer.Option("--scale/--no-scale", help="Rescale heads too; the level decides if not named.")
]
Layers = Annotated[str | None, typer.Option(help="Only these layers: '0-4,7', 'first 3' or 'last 2'.")]
Only = Annotated[
    str | None, typer.Option(metavar="|".join(PARTS), callback=choice("--only", PARTS), help="Only this part.")
]
Sweeps = Annotated[int, typer.Option(min=1, help="At most this many rounds over all spaces.")]
Many = Annotated[
    str,
    typer.Option(
        metavar="|".join(MANY),
        callback=choice("--many", MANY),
        help="Move all models to the anchor, or to a common mean that depends on no order.",
    ),
]
Nearest = Annotated[
    bool, typer.Option("--nearest", help="Take as anchor the model nearest to the mean of all that are named.")
]
SaveTransform = Annotated[Path | None, typer.Option(metavar="FILE", help="Also store the group elements found.")]
Transform = Annotated[Path | None, typer.Option(metavar="FILE", help="Apply stored group elements; solve nothing.")]
DataPath = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="PATH", help="Unlabelled images or texts; their activations align the residual stream."
    ),
]
Evidence = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(EVIDENCE),
        callback=choice("--evidence", EVIDENCE),
        help="What decides for every space; with --data, activations for the residual stream and weights elsewhere.",
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="Use N examples of --data, drawn evenly.")]
AnchorOut = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Also write the anchor, in the form OUT is to be averaged with.")
]


def align(
    context: typer.Context,
    source: Source,
    out: Out,
    anchor: Anchor = None,
    more: More = None,
    level: Level = "full",
    scale: Scale = None,
    layers: Layers = None,
    only: Only = None,
    sweeps: Sweeps = 15,
    many: Many = "anchor",
    nearest: Nearest = False,
    save_transform: SaveTransform = None,
    transform: Transform = None,
    anchor_out: AnchorOut = None,
    data: DataPath = None,
    evidence: Evidence = None,
    limit: Limit = None,
    shard_size: ShardSize = "5GB",
    out_dtype: OutDtype = None,
    device: Device = "cpu",
    threads: Threads = None,
    max_memory: MaxMemory = None,
    seed: Seed = 0,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")] = True,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write SOURCE moved as close to ANCHOR as its symmetries allow. Its function does not change.

    OUT is in ANCHOR's gauge: any tool can average the two. With more than two models, or --many universe, OUT
    gets one folder per model.
    """
    models = [source, *([anchor] if anchor else []), *(more or [])]
    _check_request(models, transform, many, nearest)
    _check_data(data, evidence, limit)
    _check_outputs(models, anchor, anchor_out, save_transform, transform, many)
    _reserve(models, out, anchor_out, save_transform, force=force)

    import isomerge
    from isomerge.reporting.terminal import align_table

    voice = Voice(json, quiet)
    start = time.perf_counter()
    with voice.work() as progress:
        alignment = isomerge.align(
            source,
            None if nearest else anchor,
            others=models[1:] if nearest else models[2:],
            level=level,
            scale=scale,
            layers=layers,
            only=only,
            sweeps=sweeps,
            many=many,
            transform=transform,
            data=data,
            evidence=evidence,
            limit=limit,
            threads=threads,
            device=device,
            max_memory=max_memory,
            seed=seed,
            progress=progress,
        )
        written = alignment.save(out, shard_size=shard_size, out_dtype=out_dtype, force=force, anchor_out=anchor_out)
        if save_transform:
            alignment.save_transform(save_transform)
        record = {**alignment.report(), **written_record(written)}
        if report:
            from isomerge.reporting.run_reports import AlignRun, write_align_reports

            done = AlignRun(alignment, _request(context), _took(start, threads, device))
            add_report(record, *write_align_reports(done, written))
            if done.problems:
                record["notes"] = [*record.get("notes", ()), *(f"NOT as it should be: {p}" for p in done.problems)]
    voice.show(record, align_table)


def _request(context: typer.Context) -> dict[str, Any]:
    """The call without its manners: as a command, and every option in force with its value."""
    words, flags, options = ["isomerge", "align"], [], {}
    for parameter in context.command.params:
        name = str(parameter.name)
        value = context.params.get(name)
        if name in MANNERS or value in (None, (), []):
            continue
        shown = Path(value).name if name == "data" else value  # where data lies is nobody's concern
        if not any(flag.startswith("-") for flag in parameter.opts):
            words += map(str, shown) if isinstance(shown, (list, tuple)) else [str(shown)]
            continue
        given = context.get_parameter_source(name)
        if given is not None and given.name == "COMMANDLINE":
            flag = parameter.opts[0] if value is not False else parameter.secondary_opts[0]
            flags += [flag] if isinstance(value, bool) else [flag, str(shown)]
        if name != "out" and not (name in SOLVING and context.params["transform"]):
            options[name] = shown
    return {"command": shlex.join([*words, *flags]), "options": options}


def _took(start: float, threads: int | None, device: str) -> dict[str, Any]:
    from isomerge.alignment.parallel import thread_count
    from isomerge.merging.merged import peak_memory

    return {
        "seconds": time.perf_counter() - start,
        "peak_memory_bytes": peak_memory(),
        "threads": thread_count(threads),
        "device": device,
    }


def _check_request(models: list[str], transform: Path | None, many: str, nearest: bool) -> None:
    if transform and not transform.is_file():
        raise RequestError(f"--transform {transform} is not a file. Make one with align … --save-transform FILE.")
    if transform and len(models) > 2:
        raise RequestError("--transform moves one model. Run it once for each of them.")
    if len(models) < 2 and not transform:
        raise RequestError("align needs a second model to move SOURCE next to: isomerge align SOURCE ANCHOR -o OUT.")
    if nearest and many == "universe":
        raise RequestError("--nearest chooses an anchor, and --many universe has none. Leave out one of the two.")


def _check_data(data: Path | None, evidence: str | None, limit: int | None) -> None:
    if data and not data.exists():
        raise RequestError(f"--data {data}: there is no such file or folder.")
    if not data and evidence in ("activations", "mix"):
        raise RequestError(f"--evidence {evidence} needs data to see activations on. Add --data PATH.")
    if not data and limit is not None:
        raise RequestError("--limit counts examples of --data, and none is named. Add --data PATH.")


def _check_outputs(
    models: list[str],
    anchor: str | None,
    anchor_out: Path | None,
    save_transform: Path | None,
    transform: Path | None,
    many: str,
) -> None:
    if save_transform and (len(models) > 2 or many == "universe"):
        raise RequestError(
            "--save-transform stores one transform, and several models have one each. Align two at a time."
        )
    if anchor_out and transform and not anchor:
        raise RequestError(
            "--anchor-out writes ANCHOR, and none was named beside --transform. Name it, or leave it out."
        )


def _reserve(models: list[str], out: Path, anchor_out: Path | None, transform: Path | None, *, force: bool) -> None:
    reserve_output(out, models, force=force)
    if anchor_out:
        reserve_output(anchor_out, models, force=force)
        if anchor_out.resolve() == out.resolve():
            raise RequestError(f"--anchor-out {anchor_out} is the folder of -o. Name two folders.")
    if transform:
        if not transform.parent.is_dir():
            raise RequestError(f"--save-transform {transform}: there is no folder {transform.parent}. Make it first.")
        if transform.exists() and not force:
            raise RequestError(f"--save-transform {transform} already exists. Name another file, or add --force.")
        announce_output(transform)
