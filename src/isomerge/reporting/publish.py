"""`isomerge.push`: finished models to the Hugging Face hub, with a card; several may become a collection."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isomerge import __version__
from isomerge.adapters.adapter import CONFIG, is_adapter, open_adapter
from isomerge.arguments import require_types, usable_path
from isomerge.checkpoint.hub import looks_like_hub_id
from isomerge.checkpoint.local import open_folder
from isomerge.checkpoint.push import CARD, collect, require_access, upload
from isomerge.errors import RequestError
from isomerge.json_files import read_json
from isomerge.reporting.card import adapter_card, card_page
from isomerge.reporting.record import RECORD, of_our_form, read_record
from isomerge.results import Result

Model = str | os.PathLike[str]


@dataclass
class PushedModel(Result):
    """One model on the hub. `card` says where its README.md is from: "folder", "written" (by this push) or "none"."""

    folder: Path
    repository: str
    address: str
    card: str


@dataclass
class Pushed(Result):
    """What a push has put on the hub."""

    models: list[PushedModel]
    collection: str | None
    """The address of the collection."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def push(
    models: Model | Sequence[Model],
    to: str,
    *,
    private: bool = True,
    revision: str | None = None,
    pull_request: bool = False,
    message: str | None = None,
    collection: str | None = None,
    token: str | None = None,
    quiet: bool = True,
) -> Pushed:
    """Upload finished models and adapters to the hub.

    `to` is the name of the repository (org/name), or the organisation or user alone: then each repository is called
    like its folder. It is made if there is none, `private` or public. `pull_request` proposes the files instead of
    committing them, `revision` names a branch. A folder without a model card gets one, from isomerge's own record of
    it: inputs, method, recipe, and what it derives from (`base_model_relation`). `collection` is the title of a
    collection of `to`'s owner that the models are put into, as for the points of a sweep. Nothing is written into the
    folders. As in `isomerge.push("merged", "me/merged", pull_request=True)`.
    """
    start = time.perf_counter()
    require_types(
        models=(models, str, os.PathLike, list, tuple), to=(to, str), private=(private, bool),
        revision=(revision, str, None), pull_request=(pull_request, bool), message=(message, str, None),
        collection=(collection, str, None), token=(token, str, None), quiet=(quiet, bool),
    )  # fmt: skip
    folders = _folders(models)
    names = _repositories(folders, to)
    if revision is not None and pull_request:
        raise RequestError(
            "Pushing: a pull request is a branch of its own. Leave out revision or pull_request.",
            keys=("revision", "pull_request"),
        )
    token = require_access(names[0], token)
    for folder in folders:  # an unfinished or damaged model is refused before the hub hears of any
        if is_adapter(folder):
            open_adapter(folder)
        else:
            open_folder(folder)
    cards = [_missing_card(folder, name) for folder, name in zip(folders, names, strict=True)]
    pushed = []
    for folder, name, card in zip(folders, names, cards, strict=True):
        done = upload(
            folder, name, token=token, private=private, revision=revision, pull_request=pull_request, message=message,
            card=card, quiet=quiet,
        )  # fmt: skip
        origin = "folder" if (folder / CARD).is_file() else "none" if card is None else "written"
        pushed.append(PushedModel(folder, name, done.address, origin))
    address = None
    if collection is not None:
        titles = {one.repository: None for one in pushed}
        address = collect(titles, names[0].split("/")[0], collection, token=token, private=private)
    notes = [
        f"{one.folder} has no model card, and no {RECORD} to write one from" for one in pushed if one.card == "none"
    ]
    return Pushed(pushed, address, notes, time.perf_counter() - start)


def _folders(models: Model | Sequence[Model]) -> list[Path]:
    listed = [models] if isinstance(models, (str, os.PathLike)) else list(models)
    if not listed:
        raise RequestError("Pushing: models is empty. Name the folder of a model.", keys=("models",))
    folders = [usable_path(one, "pushing") for one in listed]
    for folder in folders:
        if not folder.is_dir():
            raise RequestError(
                f"While pushing {folder}: there is no such folder. Name the folder of a model.", keys=("models",)
            )
    return folders


def _repositories(folders: Sequence[Path], to: str) -> list[str]:
    """The repository of each folder: the one that is named, or one for each in the owner's name."""
    if "/" not in to:
        names = [f"{to}/{folder.resolve().name}" for folder in folders]
    elif len(folders) == 1:
        names = [to]
    else:
        raise RequestError(
            f"Pushing: {len(folders)} models cannot all be '{to}'. Name the organisation or user alone, and each gets "
            "the name of its folder.",
            keys=("to",),
        )
    if len(set(names)) < len(names):
        raise RequestError(
            "Pushing: two folders have the same name, and so would their repositories. Rename one, or push each alone.",
            keys=("models",),
        )
    for name in names:
        if not looks_like_hub_id(name):
            raise RequestError(
                f"While preparing to push to {name}: '{name}' is no name of a repository. Write it as org/name or "
                "user/name.",
                keys=("to",),
            )
    return names


def _missing_card(folder: Path, repository: str) -> str | None:
    """The model card of a folder that has none; None where it has one, or where nothing is known to write."""
    if (folder / CARD).is_file():
        return None
    name = repository.split("/")[1]
    record = read_record(folder) if (folder / RECORD).is_file() else None
    if is_adapter(folder):
        config = read_json(folder / CONFIG)
        return adapter_card(name, str(config.get("base_model_name_or_path") or ""), record)
    if record is None or record["kind"] != "merge":
        return None
    with of_our_form(folder / RECORD):
        return card_page(_card_record(record, name))


def _card_record(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What `card_page` asks for, of what isomerge.json keeps. Its alignment is on the page of the report."""
    known = {key: record.get(key) for key in ("donor", "method", "summary", "paper", "recipe", "sha256")}
    return {
        **known,
        "name": name,
        "inputs": record["inputs"],
        "alignment": None,
        "version": record.get("isomerge", __version__),
    }
