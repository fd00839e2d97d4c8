"""The manifest of an ensemble: which models, how they are combined, and what was fitted.

    {"format": 1, "combination": "weighted", "task": "image", "weights": [0.7, 0.3],
     "members": [{"model": "../model-a", "sha256": "…"}, {"model": "../model-b", "sha256": "…"}]}

Paths are relative to the manifest, so a folder that holds both can be moved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from isomerge import __version__
from isomerge.addresses import is_url
from isomerge.arguments import require_types, usable_path
from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.checkpoint.hashing import hash_tensors, tensors_digest
from isomerge.data.task_heads import label_names
from isomerge.ensembling.api import assembled
from isomerge.ensembling.combinations import Combination, Shares, Stack
from isomerge.ensembling.members import load_member, open_members
from isomerge.ensembling.module import Ensemble
from isomerge.ensembling.outputs import combination_for, kind_of
from isomerge.errors import CheckpointError, NotFoundError, RequestError
from isomerge.json_files import JsonError, checked, read_json
from isomerge.reporting.record import write_text
from isomerge.threads import thread_count

FORMAT = 1
NAME = "ensemble.json"
"""In a folder."""


class _ManifestPart(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Member(_ManifestPart):
    model: str
    revision: str | None = None
    sha256: str
    """Of the hashes of its tensors, as in a lock file."""


class _StackTable(_ManifestPart):
    matrix: list[list[float]]
    bias: list[float]


class _Manifest(_ManifestPart):
    format: Literal[1]
    isomerge: str
    task: str
    combination: str
    weights: list[float]
    stack: _StackTable | None = None
    fitted_on: dict[str, Any] | None = None
    members: list[_Member]


def save_manifest(ensemble: Ensemble, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write it, and say where; see `Ensemble.save`."""
    target = free_place(path, force=force)
    stack = ensemble.shares.stack
    record = {
        "format": FORMAT, "isomerge": __version__, "task": ensemble.task, "combination": ensemble.combination.name,
        "weights": ensemble.shares.weights.tolist(),
        **({"stack": {"matrix": stack.matrix.tolist(), "bias": stack.bias.tolist()}} if stack else {}),
        **({"fitted_on": ensemble.fitted_on} if ensemble.fitted_on else {}),
        "members": [_described(one.checkpoint, target) for one in ensemble.stock],
    }  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return target


def free_place(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """The file that is to be written, which must not exist yet unless `force` replaces it."""
    require_types(save=(path, str, os.PathLike), force=(force, bool))
    target = _file(usable_path(path, "saving the ensemble as"))
    if above := next((one for one in target.absolute().parents if one.is_file()), None):
        raise RequestError(
            f"Saving the ensemble as {target}: {above.name} is a file and not a folder. Name a new .json file, or a "
            "folder.",
            keys=("save",),
        )
    if target.exists() and not force:
        raise RequestError(
            f"Saving the ensemble as {target}: the file exists. Pass force to replace it.", keys=("force",)
        )
    return target


def _file(path: Path) -> Path:
    return path if path.suffix == ".json" and not path.is_dir() else path / NAME


def is_manifest(model: Any) -> bool:
    """Whether a path names a manifest, or a folder with one."""
    return isinstance(model, (str, os.PathLike)) and not is_url(model) and _file(Path(model).expanduser()).is_file()


def named_ensemble(models: Any, device: str | None) -> Ensemble | None:
    """The ensemble of a manifest, where a manifest stands in the place of the models."""
    alone = models[0] if isinstance(models, (list, tuple)) and len(models) == 1 else models
    meant = isinstance(alone, (str, os.PathLike)) and os.fspath(alone).endswith(".json")  # loading says it is not there
    return load_ensemble(alone, device=device) if meant or is_manifest(alone) else None


def _described(checkpoint: Checkpoint, target: Path) -> dict[str, Any]:
    if checkpoint.in_memory:
        raise RequestError(
            f"Saving the ensemble as {target}: its member {checkpoint.name} is in memory, so no path names it. "
            "Write it to a folder, and make the ensemble of the folders."
        )
    digest = tensors_digest(hash_tensors(checkpoint, threads=thread_count(None)))
    if checkpoint.revision is not None or is_url(checkpoint.name):
        return {"model": checkpoint.name, "revision": checkpoint.revision, "sha256": digest}
    own = Path(checkpoint.name).expanduser().absolute()
    try:
        relative = os.path.relpath(own, target.parent.absolute())
    except ValueError:  # another drive
        relative = str(own)
    return {"model": Path(relative).as_posix(), "sha256": digest}


def load_ensemble(path: str | os.PathLike[str], *, check: bool = False, device: str | None = None) -> Ensemble:
    """The ensemble of a manifest (or of a folder with one) as a module: `forward`, `predict`, and for language models
    `generate`.

    `check` compares the weights of every member with the hashes in the manifest.

    >>> where = isomerge.make_ensemble(["model-a", "model-b"]).save("both.json")
    >>> isomerge.load_ensemble(where).combination.name
    'probability'
    """
    require_types(path=(path, str, os.PathLike), check=(check, bool), device=(device, str, None))
    file = _file(usable_path(path, "loading the ensemble"))
    manifest = _read(file)
    act = f"While loading the ensemble {file}"
    checkpoints = [_opened(member, file, act) for member in manifest.members]
    if check:
        _require_same(manifest.members, checkpoints, act)
    opened, task = open_members(checkpoints, manifest.task)
    chosen = combination_for(manifest.combination, task, opened[0].config, len(opened))
    if (wrong := _unlike(manifest, chosen, opened[0])) is not None:
        raise CheckpointError(f"{act}: {wrong}. Save the ensemble again.")
    stock = [load_member(one, one, device) for one in opened]
    ensemble = assembled(stock, task, chosen, _shares(manifest))
    ensemble.fitted_on = manifest.fitted_on
    return ensemble


def _read(file: Path) -> _Manifest:
    act = f"While loading the ensemble {file}"
    try:
        manifest = checked(_Manifest, read_json(file))
        if len(manifest.weights) != len(manifest.members) or not manifest.members:
            raise JsonError(f"it has {len(manifest.members)} members and {len(manifest.weights)} weights")
        if min(manifest.weights) < 0 or abs(sum(manifest.weights) - 1) > 1e-6:
            raise JsonError(f"its weights {manifest.weights} are not shares of one")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"{act}: there is no such file. Name the saved manifest, or its folder.") from error
    except (OSError, JsonError) as error:
        raise CheckpointError(f"{act}: {error}. Save the ensemble again.") from error
    return manifest


def _opened(member: _Member, file: Path, act: str) -> Checkpoint:
    if member.revision is not None or is_url(member.model):
        return open_checkpoint(member.model, revision=member.revision)
    place = usable_path(file.parent / member.model, f"opening a member of {file}:")
    if not place.exists():
        raise NotFoundError(
            f"{act}: its member {member.model} is not there ({place.absolute()}). Put the model back, or "
            "correct its path in the manifest, to which it is relative."
        )
    return open_checkpoint(place)


def _require_same(members: Sequence[_Member], checkpoints: Sequence[Checkpoint], act: str) -> None:
    for member, checkpoint in zip(members, checkpoints, strict=True):
        if tensors_digest(hash_tensors(checkpoint, threads=thread_count(None))) != member.sha256:
            raise CheckpointError(
                f"{act}: the weights of {member.model} are not those it was made of. Put these back, or make the "
                "ensemble again."
            )


def _unlike(manifest: _Manifest, chosen: Combination, first: Checkpoint) -> str | None:
    """How its stack is not that of these members, if it is not."""
    if (chosen.finds == "stack") != (manifest.stack is not None):
        return f"'{chosen.name}' has {'no stack' if manifest.stack is None else 'a stack, which it does not use'}"
    if manifest.stack is None:
        return None
    classes = 2 if kind_of(manifest.task, first.config) == "labels" else len(label_names(first.config))
    width = classes * len(manifest.members)
    if len(manifest.stack.bias) == classes == len(manifest.stack.matrix) and all(
        len(row) == width for row in manifest.stack.matrix
    ):
        return None
    return f"its stack is not a matrix of {classes} × {width} with {classes} biases"


def _shares(manifest: _Manifest) -> Shares:
    def exact(numbers: Any) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64)

    stack = manifest.stack
    return Shares(exact(manifest.weights), Stack(exact(stack.matrix), exact(stack.bias)) if stack else None)
