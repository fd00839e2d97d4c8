"""`isomerge push MODEL… ORG/NAME`: finished models to the hub, by commit or pull request, alone or as a collection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from isomerge.cli.flags import option, switch
from isomerge.cli.output import Record, Voice, listing
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb("Upload finished models to the hub.", "isomerge push merged org/merged --pull-request")
def push(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL... TO", help="Folders, and at the end org/name, or org alone for one repository per folder."
        ),
    ],
    *,
    pull_request: Annotated[bool, switch("--pull-request", "Open a pull request instead of committing.")] = False,
    public: Annotated[bool, switch("--public", "Make a new repository public; it is private otherwise.")] = False,
    revision: Annotated[str | None, option("BRANCH", "Commit to this branch; it is made if need be.")] = None,
    message: Annotated[str | None, option("TEXT", "The commit's message.")] = None,
    collection: Annotated[str | None, option("TITLE", "Put the models into a collection of this title.")] = None,
    voice: Voice,
) -> None:
    """Upload finished models and adapters to the Hugging Face hub.

    HF_TOKEN or `hf auth login` gives the token. A folder without a model card gets one, from isomerge's record of it.
    """
    *models, to = words
    if not models:
        raise RequestError(f"A push needs a folder and where it goes: isomerge push {to} ORG/NAME.")

    from isomerge.reporting.publish import push as push_models

    with voice.work():
        record = push_models(
            models, to, private=not public, revision=revision, pull_request=pull_request, message=message,
            collection=collection, quiet=voice.is_silent,
        ).to_dict()  # fmt: skip
    voice.show(record, push_table)


def push_table(record: Record) -> RenderableType:
    """One row per model; the collection's address."""
    from rich.console import Group
    from rich.text import Text

    table = listing("folder", "address", "model card")
    for model in record["models"]:
        table.add_row(Text(str(model["folder"])), Text(model["address"]), CARDS[model["card"]])
    lines = [f"collection: {record['collection']}"] if record["collection"] else []
    return Group(table, *map(Text, lines), *(Text(f"• {note}") for note in record["notes"]))


CARDS = {"folder": "in the folder", "written": "written from the record", "none": "none"}
