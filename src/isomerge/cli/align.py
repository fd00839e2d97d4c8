"""`isomerge align SOURCE ANCHOR -o OUT`: write SOURCE moved next to ANCHOR, its function unchanged."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from isomerge.addresses import is_url, usable_url
from isomerge.choices import MANY, MEASURES, ORDER_SOLVERS, PARTS
from isomerge.cli.flags import (
    Address,
    AlignMemory,
    Device,
    Engine,
    Evidence,
    Force,
    Learn,
    LearnTowards,
    Level,
    Limit,
    OutDtype,
    ShardSize,
    Threads,
    choice,
    option,
    switch,
)
from isomerge.cli.interruption import announce_output
from isomerge.cli.merge import written_record
from isomerge.cli.output import Voice, as_record
from isomerge.cli.report import add_report
from isomerge.cli.request import place_of, reserve_output
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

# Flags that change what the run prints or may replace, and not what it computes.
NOT_RECORDED = ("json", "quiet", "debug", "force", "report", "engine", "address")
# Settings of the solver, which a stored transform does not use.
SOLVER_SETTINGS = ("level", "sweeps", "solver", "many", "nearest")


@verb(
    "Write SOURCE moved as close to ANCHOR as its symmetries allow.",
    "isomerge align model-b model-a -o model-b-aligned --level full",
)
def align(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The model to move: a folder, a file or a hub id.")],
    anchor: Annotated[str | None, typer.Argument(metavar="ANCHOR", help="The model to move it next to.")] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="MORE", help="Further models to move.")] = None,
    *,
    out: Annotated[Path, option("OUT", "The folder to write, or an address (s3://, gs://).", "-o", "--out")],
    level: Level = "full",
    scale: Annotated[
        bool | None, switch("--scale/--no-scale", "Rescale heads too; the level decides by default.")
    ] = None,
    layers: Annotated[str | None, option("SET", "Only these layers: '0-4,7', 'first 3' or 'last 2'.")] = None,
    only: Annotated[str | None, choice("--only", PARTS, "Only this part.")] = None,
    sweeps: Annotated[int, option("N", "At most this many rounds over all spaces.", min=1)] = 15,
    solver: Annotated[
        str, choice("--solver", ORDER_SOLVERS, "How the orders of units are found; see isomerge list solvers.")
    ] = "assignment",
    many: Annotated[
        str, choice("--many", MANY, "Move all models to the anchor, to a common mean, or to each other.")
    ] = "anchor",
    nearest: Annotated[bool, switch("--nearest", "Use as anchor the model nearest to the mean of all models.")] = False,
    save_transform: Annotated[Path | None, option("FILE", "Also store the transform that was found.")] = None,
    transform: Annotated[Path | None, option("FILE", "Apply a stored transform instead of solving.")] = None,
    anchor_out: Annotated[Path | None, option("DIR", "Also write the anchor in the form to average OUT with.")] = None,
    data: Annotated[
        Path | None,
        option("PATH", "Unlabelled images or texts; their activations align the residual stream.", "--data"),
    ] = None,
    evidence: Evidence = None,
    measure: Annotated[
        str | None, choice("--measure", MEASURES, "How activations are compared; covariance by default.")
    ] = None,
    learn: Learn = None,
    learn_towards: LearnTowards = None,
    limit: Limit = None,
    shard_size: ShardSize = "5GB",
    out_dtype: OutDtype = None,
    device: Device = "cpu",
    threads: Threads = None,
    engine: Engine = "threads",
    address: Address = None,
    max_memory: AlignMemory = None,
    seed: Annotated[int, option("N", "Random seed of --learn; nothing else is drawn.")] = 0,
    report: Annotated[bool, switch("--report/--no-report", "Write report.html.")] = True,
    force: Force = False,
    voice: Voice,
) -> None:
    """Write SOURCE moved as close to ANCHOR as its symmetries allow. Its function does not change.

    OUT is in ANCHOR's gauge, so any tool can average the two. With more than two models, or --many universe or
    cycle, OUT gets one folder per model.
    """
    models = [source, *([anchor] if anchor else []), *(more or [])]
    _check_request(models, transform, many, nearest)
    _check_data(data, evidence, measure, learn, learn_towards, limit)
    _check_outputs(models, out, anchor, anchor_out, save_transform, transform, many)
    _reserve(models, out, anchor_out, save_transform, force=force)

    import isomerge
    from isomerge.reporting.terminal import align_table

    start = time.perf_counter()
    problems: list[str] = []
    with place_of(out, force=force) as place, voice.work() as progress:
        options: dict[str, Any] = {
            "level": level, "scale": scale, "layers": layers, "only": only, "sweeps": sweeps,
            "solver": solver, "data": data, "evidence": evidence,
            "measure": measure or "covariance", "limit": limit, "learn": learn or 0,
            "learn_towards": learn_towards or "predictions", "seed": seed, "threads": threads, "engine": engine,
            "address": address, "device": device, "max_memory": max_memory, "progress": progress,
            "resume": place.folder,
        }  # fmt: skip
        alignment: isomerge.Alignment | isomerge.AlignedFamily
        if transform is None and (len(models) > 2 or nearest or many != "anchor"):
            family = isomerge.align_family(
                models if nearest or many != "anchor" else [source, *models[2:]],
                anchor=None if nearest or many != "anchor" else anchor,
                many=many,
                **options,
            )
            alignment = family if len(family.members) > 1 else family.members[0]
        else:
            alignment = isomerge.align(source, anchor, transform=transform, **options)
        written = alignment.save(
            place.folder, shard_size=shard_size, out_dtype=out_dtype, force=force, anchor_out=anchor_out, report=report,
            finish=False,
        )  # fmt: skip
        if save_transform:
            alignment.save_transform(save_transform)
        record = as_record(alignment.report()) | written_record(written)
        if report:
            from isomerge.alignment.record import write_pages

            pages, problems = write_pages(alignment, written, _request(context), _took(start, threads, device))
            add_report(record, *pages)
            record["notes"] = [*record.get("notes", ()), *(f"Verification failed: {problem}" for problem in problems)]
        record = place.send(record, progress)
        written.finish()
    voice.show(record, align_table)
    if problems and not force:
        raise typer.Exit(1)


def _request(context: typer.Context) -> dict[str, Any]:
    """The call as a command, and every option in force with its value."""
    words, flags, options = ["isomerge", "align"], [], {}
    for parameter in context.command.params:
        name = str(parameter.name)
        value = context.params.get(name)
        if name in NOT_RECORDED or value in (None, (), []) or (name == "trust_remote_code" and not value):
            continue
        shown = Path(value).name if name == "data" else value  # where data is stored stays private
        if name == "out" and is_url(value):
            shown = usable_url(value, "preparing to write")  # a path has lost one of its slashes
        if not any(flag.startswith("-") for flag in parameter.opts):
            words += map(str, shown) if isinstance(shown, (list, tuple)) else [str(shown)]
            continue
        given = context.get_parameter_source(name)
        if given is not None and given.name == "COMMANDLINE":
            flag = parameter.opts[0] if value is not False else parameter.secondary_opts[0]
            flags += [flag] if isinstance(value, bool) else [flag, str(shown)]
        if name != "out" and not (name in SOLVER_SETTINGS and context.params["transform"]):
            options[name] = shown
    return {"command": shlex.join([*words, *flags]), "options": options}


def _took(start: float, threads: int | None, device: str) -> dict[str, Any]:
    from isomerge.system import peak_memory
    from isomerge.threads import thread_count

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
    if transform and nearest:
        raise RequestError("--nearest chooses an anchor, and --transform needs none. Leave out one of the two.")
    if len(models) < 2 and not transform:
        raise RequestError("align needs a second model to move SOURCE next to: isomerge align SOURCE ANCHOR -o OUT.")
    if nearest and many != "anchor":
        raise RequestError(f"--nearest chooses an anchor, and --many {many} has none. Leave out one of the two.")


def _check_data(
    data: Path | None,
    evidence: str | None,
    measure: str | None,
    learn: int | None,
    learn_towards: str | None,
    limit: int | None,
) -> None:
    if data and not data.exists():
        from isomerge.checkpoint.local import broken_link

        why = broken_link(data) if data.is_symlink() else "there is no such file or folder"
        raise RequestError(f"--data {data}: {why}. Check the path.")
    if not data and evidence in ("activations", "mix"):
        raise RequestError(f"--evidence {evidence} needs data to run the models on. Add --data PATH.")
    if measure and (not data or evidence == "weights"):
        raise RequestError("--measure compares activations. Add --data PATH, and leave out --evidence weights.")
    if not data and learn is not None:
        raise RequestError("--learn needs data to run the models on. Add --data PATH.")
    if learn is None and learn_towards is not None:
        raise RequestError("--learn-towards has no effect without --learn. Add --learn N.")
    if not data and limit is not None:
        raise RequestError("--limit has no effect without data. Add --data PATH.")


def _check_outputs(
    models: list[str],
    out: Path,
    anchor: str | None,
    anchor_out: Path | None,
    save_transform: Path | None,
    transform: Path | None,
    many: str,
) -> None:
    if is_url(out) and (len(models) > 2 or many != "anchor"):
        raise RequestError("Several models are aligned into one folder each, and -o is an address. Name a folder.")
    if save_transform and (len(models) > 2 or many != "anchor"):
        raise RequestError("--save-transform stores one transform, but each model has its own. Align two at a time.")
    if anchor_out and transform and not anchor:
        raise RequestError("--anchor-out needs an ANCHOR beside --transform. Name one, or leave --anchor-out out.")


def _reserve(models: list[str], out: Path, anchor_out: Path | None, transform: Path | None, *, force: bool) -> None:
    from isomerge.checkpoint.staging import is_unfinished

    reserve_output(out, models, force=force, by_url=True)
    if anchor_out:
        reserve_output(anchor_out, models, force=force)
        if anchor_out.resolve() == out.resolve():
            raise RequestError(f"--anchor-out {anchor_out} is the folder of -o. Name two folders.")
    if transform:
        if not transform.parent.is_dir():
            raise RequestError(f"--save-transform {transform}: there is no folder {transform.parent}. Create it first.")
        if transform.exists() and not force and not is_unfinished(out):
            raise RequestError(f"--save-transform {transform} already exists. Name another file, or add --force.")
        announce_output(transform)
