"""`isomerge transplant MODEL --tokenizer DONOR -o OUT`: a model with another one's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from isomerge.choices import NEW_TOKEN_ROWS
from isomerge.cli.flags import Data, Device, Force, Model, OutDtype, Reading, ShardSize, Threads, choice, option, switch
from isomerge.cli.merge import finished
from isomerge.cli.output import Record, Voice, listing, number
from isomerge.cli.request import place_of, reserve_output
from isomerge.cli.verb import verb

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb(
    "Give a model the tokenizer of another one.",
    "isomerge transplant model-a --tokenizer model-b -o drafting",
)
def transplant(
    model: Model,
    *,
    tokenizer: Annotated[str, option("DONOR", "The model whose tokenizer the result gets.")],
    out: Annotated[Path, option("OUT", "The folder to write, or an address (s3://, gs://).", "-o", "--out")],
    method: Annotated[
        str,
        choice(
            "--method",
            NEW_TOKEN_ROWS,
            "Rows of new tokens: combinations of shared ones, means of the pieces of their text, or the donor's rows.",
        ),
    ] = "omp",
    k: Annotated[int, option("N", "Shared tokens that a row is made of at most, for omp.", "--k", "-k", min=1)] = 64,
    data: Data = None,
    reading: Reading,
    length: Annotated[int | None, option("N", "Longest text, in tokens; the model's limit by default.", min=2)] = None,
    shard_size: ShardSize = "5GB",
    out_dtype: OutDtype = None,
    device: Device = "cpu",
    threads: Threads = None,
    verify: Annotated[bool, switch("--verify/--no-verify", "Check the written model.")] = True,
    report: Annotated[bool, switch("--report/--no-report", "Write a model card and report.html.")] = True,
    force: Force = False,
    voice: Voice,
) -> None:
    """Give a model the tokenizer of another one. Rows of tokens that both know stay, rows of new ones are made.

    With --data the bits per byte before and after are measured.
    """
    reserve_output(out, [model, tokenizer, *([str(data)] if data else [])], force=force, by_url=True)
    settings: dict[str, Any] = {"path": str(data), **vars(reading), "length": length}
    read = {key: value for key, value in settings.items() if value is not None} if data else None

    import isomerge

    with place_of(out, force=force) as place, voice.work("both") as progress:
        merged = isomerge.transplant(
            model, tokenizer, how=method, k=k, data=read, threads=threads, device=device, resume=place.folder,
            progress=progress,
        )  # fmt: skip
        written = merged.save(
            place.folder, shard_size=shard_size, out_dtype=out_dtype, force=force, report=report, finish=False
        )
        record = place.send(finished(merged, written, verify=verify, report=report), progress)
        written.finish()
    voice.show(record, transplant_table)


def transplant_table(record: Record) -> RenderableType:
    """What became of the tokens, the loss before and after, and what was written."""
    from rich.console import Group
    from rich.text import Text

    from isomerge.reporting.terminal import merge_table

    about = record["transplant"]
    tokens = listing("tokens", "known", "new", numbers=True)
    tokens.add_row(Text(f"{about['tokens']}"), f"{about['known']}", f"{about['new']}")
    parts: list[Any] = [tokens]
    if "loss" in about:
        losses = listing("bits per byte", "before", "after", numbers=True)
        losses.add_row(Text(""), *(number(about["loss"][when]["bits_per_byte"]) for when in ("before", "after")))
        parts.append(losses)
    return Group(*parts, merge_table(record))
