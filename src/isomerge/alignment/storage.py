"""Transforms on disk: a safetensors file with the group elements and the anchor's gauge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from isomerge.alignment.scope import Scope
from isomerge.architectures import describe
from isomerge.checkpoint import Checkpoint
from isomerge.choices import Level, Part
from isomerge.errors import AlignmentError, IsomergeError, RequestError
from isomerge.json_files import JsonError, checked, parse_json
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.groups import GROUPS, Group
from isomerge.symmetry.transform import Transform, batch_sizes

if TYPE_CHECKING:
    from isomerge.alignment.result import Alignment

FORMAT = "isomerge-transform-1"


def save_transform(alignment: Alignment, path: Path) -> None:
    """Write aside, then rename: a half-written file never looks finished."""
    tensors = {f"element:{s}": _stored(e) for s, e in alignment.transform.elements.items()}
    tensors |= {f"gauge:{key}": value.contiguous() for key, value in alignment.anchor_gauge().items()}
    spaces = {s: {"group": g.name, **asdict(g)} for s, g in alignment.source.architecture.spaces.items()}
    metadata = {
        "format": FORMAT,
        "family": alignment.source.architecture.family,
        "scope": json.dumps(asdict(alignment.scope), sort_keys=True),
        "untied": json.dumps(alignment.untied),
        "spaces": json.dumps(spaces, sort_keys=True),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".partial")
    try:
        save_file(tensors or {"empty": torch.zeros(1)}, aside, metadata=metadata)
        aside.replace(path)
    except (OSError, SafetensorError) as error:
        raise AlignmentError(
            f"Writing the transform {path}: {error}. The model itself is written; make room and save again with force.",
            keys=("force",),
        ) from error
    finally:
        aside.unlink(missing_ok=True)


@dataclass
class StoredTransform:
    """A stored transform bound to another checkpoint, and the gauge to write it in."""

    source: BoundModel
    anchor: BoundModel | None
    scope: Scope
    transform: Transform
    gauge: dict[str, Tensor]


def load_transform(path: Path, source: Checkpoint, anchor: Checkpoint | None) -> StoredTransform:
    """Read a stored transform for another checkpoint; every misfit is an error."""
    about, tensors = _read(path)
    family = source.config.get("model_type")
    if about.family != family:
        raise RequestError(
            f"Applying {path} to {source.name}: the transform is for '{about.family}' models, this one is "
            f"'{family}'. Use a checkpoint of that architecture."
        )
    untie, spaces = about.untied, about.groups()
    models = [describe(c, untie=untie) if c else None for c in (source, anchor)]
    for model in filter(None, models):
        own = {name: group.size for name, group in model.architecture.spaces.items()}
        wrong = [n for n, g in spaces.items() if own.get(n) != g.size]
        if wrong:
            raise RequestError(
                f"Applying {path} to {model.name}: space {wrong[0]} has {spaces[wrong[0]].size} units in the transform "
                f"and {own.get(wrong[0], 'none')} in the model. Use a checkpoint of the same size and head class."
            )
    bound = [replace(m, architecture=replace(m.architecture, spaces=spaces)) if m else None for m in models]
    elements = {name: _loaded(tensor, spaces, name) for name, tensor in _under("element:", tensors).items()}
    gauge = _under("gauge:", tensors)
    assert bound[0] is not None
    scope = Scope(**about.scope.model_dump())
    return StoredTransform(bound[0], bound[1], scope, Transform(spaces, elements), gauge)


def _under(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one kind, by their names without it."""
    return {key.removeprefix(kind): tensor for key, tensor in tensors.items() if key.startswith(kind)}


def _read(path: Path) -> tuple[TransformInfo, dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # In memory of their own: BLAS rounds by how a tensor is aligned, and the file aligns to 8 bytes only.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        cause = "there is no such file. Make one with Alignment.save_transform."
        raise RequestError(f"Reading the transform {path}: {cause}", keys=("save_transform",)) from error
    except (SafetensorError, OSError) as error:
        message = f"Reading the transform {path}: {error}. Make it again with Alignment.save_transform."
        raise AlignmentError(message, keys=("save_transform",)) from error
    if metadata.get("format") != FORMAT:
        raise RequestError(
            f"Reading the transform {path}: not a file written by Alignment.save_transform.", keys=("save_transform",)
        )
    try:
        parsed = {key: parse_json(metadata.get(key, "null")) for key in ("scope", "untied", "spaces")}
        return checked(TransformInfo, {"family": metadata.get("family"), **parsed}), tensors
    except JsonError as error:
        message = f"Reading the transform {path}: {error}. Make it again with Alignment.save_transform."
        raise AlignmentError(message, keys=("save_transform",)) from error


class StoredScope(BaseModel):
    """The fields of `Scope`."""

    level: Level = "full"
    scale: bool | None = None
    layers: str | None = None
    only: Part | None = None


class StoredGroup(BaseModel):
    """A space's group by its name, with the fields that it has."""

    model_config = ConfigDict(extra="forbid")

    group: str
    size: int = Field(ge=1, le=2**31)
    per: list[str]
    layout: Literal["half", "interleaved"] | None = None
    phase: Literal["any", "sign", "none"] | None = None
    scale: bool | None = None

    @model_validator(mode="after")
    def _is_known(self) -> StoredGroup:
        self.made()
        return self

    def made(self) -> Group:
        fields = self.model_dump(exclude={"group"}, exclude_none=True)
        try:
            return GROUPS[self.group](**{**fields, "per": tuple(self.per)})
        except (KeyError, TypeError, IsomergeError):
            raise ValueError("no group is like this") from None


class TransformInfo(BaseModel):
    """The metadata of a stored transform."""

    family: str
    scope: StoredScope
    untied: bool
    spaces: dict[str, StoredGroup]

    @model_validator(mode="after")
    def _are_nested(self) -> TransformInfo:
        for name, space in self.spaces.items():
            if not set(space.per) <= self.spaces.keys() - {name}:
                raise ValueError(f"space {name} lies in one that is not there")
        return self

    def groups(self) -> dict[str, Group]:
        return {name: space.made() for name, space in self.spaces.items()}


def _stored(element: Tensor) -> Tensor:
    return torch.view_as_real(element).contiguous() if element.is_complex() else element.contiguous()


def _loaded(tensor: Tensor, spaces: dict[str, Group], name: str) -> Tensor:
    group = spaces.get(name)
    if group is None:
        raise AlignmentError(f"Reading the transform: it has an element for {name}, which is no space of it.")
    identity = group.identity(batch_sizes(spaces, name))
    pairs = identity.is_complex() and not tensor.is_complex() and tensor.shape[-1:] == (2,)
    element = torch.view_as_complex(tensor) if pairs and tensor.dtype == torch.float64 else tensor
    fits = element.shape == identity.shape and element.dtype == identity.dtype
    if not fits or not group.contains(element):
        cause = f"the element of {name} is not a {group.name}. The file is damaged."
        raise AlignmentError(f"Reading the transform: {cause}")
    return element
