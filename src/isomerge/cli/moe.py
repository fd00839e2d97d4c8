"""`isomerge moe RECIPE -o OUT`: a mixture of experts made of dense models, made smaller, or made dense."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.choices import GATE_MODES, TO_DENSE
from isomerge.cli.flags import Device, Force, OutDtype, Reading, ShardSize, Threads, choice, option, switch
from isomerge.cli.merge import finished
from isomerge.cli.output import Record, Voice, listing, number
from isomerge.cli.request import MergeRequest, place_of, reserve_output
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb(
    "Build a mixture of experts from dense models, or shrink one.",
    "isomerge moe model-a --copies 4 -o mixture",
)
def moe(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE.yml | A B …", help="A recipe as for mergekit-moe, dense models, or a mixture."),
    ],
    *,
    out: Annotated[Path, option("OUT", "The folder to write, or an address (s3://, gs://).", "-o", "--out")],
    base: Annotated[str | None, option("MODEL", "What gives all but the experts; else the first model.")] = None,
    copies: Annotated[int | None, option("N", "Make so many experts of one dense model.", min=1)] = None,
    keep: Annotated[int | None, option("K", "Keep so many experts of a mixture: like ones are joined.", min=1)] = None,
    to_dense: Annotated[
        str | None,
        choice("--to-dense", TO_DENSE, "Make a mixture dense: what becomes of its experts."),
    ] = None,
    gate_mode: Annotated[str | None, choice("--gate-mode", GATE_MODES, "What the routers are made of.")] = None,
    experts_per_token: Annotated[int | None, option("N", "How many experts a token is sent to.", min=1)] = None,
    architecture: Annotated[str | None, option("NAME", "The class to build, where several fit: mixtral, qwen.")] = None,
    data: Annotated[
        list[Path] | None,
        option("PATH", "Texts to measure and fit routers on; once for all, or once per model, in order.", "--data"),
    ] = None,
    reading: Reading,
    length: Annotated[int | None, option("N", "Longest text, in tokens; the model's limit by default.", min=2)] = None,
    batch_size: Annotated[int | None, option("N", "Examples per batch.", min=1)] = None,
    shard_size: ShardSize = "5GB",
    out_dtype: OutDtype = None,
    device: Device = "cpu",
    threads: Threads = None,
    seed: Annotated[int | None, option("N", "Random seed; the recipe's, or 0, by default.")] = None,
    copy_tokenizer: Annotated[
        bool, switch("--copy-tokenizer/--no-copy-tokenizer", "Copy the tokenizer with the other side files.")
    ] = True,
    verify: Annotated[bool, switch("--verify/--no-verify", "Check the written model.")] = True,
    report: Annotated[bool, switch("--report/--no-report", "Write a model card and report.html.")] = True,
    force: Force = False,
    voice: Voice,
) -> None:
    """Build a mixture of experts: feed-forwards of dense models as experts, and a router for each layer.

    isomerge moe MODEL --copies 8 makes a mixture with the function of MODEL, isomerge moe MIXTURE --keep 4 a smaller
    one, and isomerge moe MIXTURE --to-dense average a dense model.
    """
    recipe = MergeRequest(sources).recipe if copies is None and keep is None and to_dense is None else None
    if recipe is None and len(sources) > 1 and (copies or keep or to_dense):
        raise RequestError("--copies, --keep and --to-dense take one model. Name one.")
    if recipe is None and len(sources) == 1 and not (copies or keep or to_dense):
        raise RequestError(
            "moe needs a recipe, or models: isomerge moe recipe.yml -o OUT, or isomerge moe model-a model-b -o OUT. Of "
            "one model it makes experts with --copies N, and of a mixture a smaller one with --keep K."
        )
    reserve_output(out, [*sources, *([base] if base else []), *map(str, data or ())], force=force, by_url=True)
    settings = {**vars(reading), "length": length, "batch_size": batch_size}
    read = [{"path": str(path), **{k: v for k, v in settings.items() if v is not None}} for path in data or ()]
    source: Any = recipe or (sources[0] if len(sources) == 1 else sources)

    import isomerge

    with place_of(out, force=force) as place, voice.work("both") as progress:
        merged = isomerge.moe(
            source, base=base, copies=copies, keep=keep, to_dense=to_dense, gate_mode=gate_mode,
            experts_per_token=experts_per_token, architecture=architecture,
            data=None if not read else read[0] if len(read) == 1 else read, threads=threads, device=device, seed=seed,
            resume=place.folder, progress=progress,
        )  # fmt: skip
        written = merged.save(
            place.folder, shard_size=shard_size, out_dtype=out_dtype, force=force, report=report,
            copy_tokenizer=copy_tokenizer, finish=False,
        )  # fmt: skip
        record = place.send(finished(merged, written, verify=verify, report=report), progress)
        written.finish()
    voice.show(record, moe_table)


def moe_table(record: Record) -> RenderableType:
    """Where each data set was sent, losses, and what was written."""
    from rich.console import Group
    from rich.text import Text

    from isomerge.reporting.terminal import merge_table

    rows = (record.get("moe") or {}).get("measured") or []
    parts: list[Any] = []
    if rows:
        names = record["moe"]["experts"]
        experts = [f"{place}: {Path(name).name}" for place, name in enumerate(names, start=1)]
        table = listing("sent to", *experts, numbers=True)
        losses = listing("loss", *rows[0]["loss"], numbers=True)
        for row in rows:
            table.add_row(Text(row["data"]), *(f"{share:.0%}" for share in row["routing"]))
            losses.add_row(Text(row["data"]), *("" if one is None else number(one) for one in row["loss"].values()))
        parts += [table, losses]
    for key in ("shrunk", "made_dense"):
        loss = (record.get(key) or {}).get("loss")
        if loss and None not in loss.values():
            table = listing("loss", "before", "after", numbers=True)
            table.add_row(Text("nats per token"), number(loss["before"]), number(loss["after"]))
            parts.append(table)
    return Group(*parts, merge_table(record))
