"""`open_checkpoint`: one door for paths, hub ids, state_dicts and modules."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from isomerge.addresses import SCHEMES, is_url
from isomerge.arguments import require_types, usable_path
from isomerge.checkpoint.base import Checkpoint
from isomerge.checkpoint.config import config_problems
from isomerge.checkpoint.hub import looks_like_hub_id, open_hub
from isomerge.checkpoint.local import broken_link, only_gguf, open_file, open_folder, unreadable
from isomerge.checkpoint.memory import MemoryCheckpoint, open_module
from isomerge.checkpoint.side_files import is_weight
from isomerge.errors import CheckpointError, IsomergeError, NotFoundError, RequestError, near_miss
from isomerge.text import without_secrets


class ModelResult(Protocol):
    """What a function gave back that stands for a model: a merge, an alignment."""

    def as_checkpoint(self) -> Checkpoint: ...


CheckpointSource = (
    str | os.PathLike[str] | Mapping[str, torch.Tensor | np.ndarray] | nn.Module | Checkpoint | ModelResult
)

FILE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
GGUF = ".gguf"
PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/)([\w.-]+/[\w.-]+)")
"""A model's page at the hub, as it is copied from a browser."""


def open_checkpoint(
    source: CheckpointSource,
    *,
    revision: str | None = None,
    config: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Checkpoint:
    """Open a checkpoint, reading headers only.

    `source` is a folder or a single weight file, here or behind a URL (s3://, gs://, hf://, https://), a GGUF file, a
    hub id `org/name`, a state_dict of tensors or numpy arrays, an nn.Module, or a result: what `merge`, `align` and
    `save` give back. `config` and `name` replace what the source says about itself, and give a state_dict what it
    cannot say.

    >>> open_checkpoint({"weight": torch.zeros(2, 3)}).tensors["weight"].shape
    (2, 3)
    """
    require_types(revision=(revision, str, None), config=(config, Mapping, None), name=(name, str, None))
    checkpoint = _open(source, revision)
    if "quantization_config" in checkpoint.config:
        from isomerge.checkpoint.formats.block_scales import dequantised

        checkpoint = dequantised(checkpoint)
    if config is None and name is None:
        return checkpoint
    checkpoint = copy.copy(checkpoint)  # the source may itself be a Checkpoint, which keeps its own config and name
    if config is not None:
        if problems := config_problems(config, len(checkpoint.tensors)):
            raise RequestError(f"While opening checkpoint {checkpoint.name}: {'; '.join(problems)}.", keys=("config",))
        checkpoint.config = dict(config)
    if name is not None:
        checkpoint.name = name
    return checkpoint


def with_config(models: Iterable[Any], config: Mapping[str, Any] | None) -> list[Any]:
    """The models, state_dicts among them with this config, which they cannot say themselves.

    Without it they get that of a model beside them which has the same tensors in the same shapes.
    """
    require_types(config=(config, Mapping, None))
    models = list(models)
    bare = [isinstance(model, Mapping) for model in models]
    if config is None:
        others = [model for model in models if not isinstance(model, Mapping)]
        return [_like_one_of(others, model, n) if bare[n - 1] else model for n, model in enumerate(models, start=1)]
    if not any(bare):
        raise RequestError(
            "Reading the models: config is that of state_dicts, and none of them is one. Leave it out; folders and "
            "modules have their own.",
            keys=("config",),
        )
    return [
        open_checkpoint(model, config=config, name=f"model {place}") if is_bare else model
        for place, (model, is_bare) in enumerate(zip(models, bare, strict=True), start=1)
    ]


def _like_one_of(others: Iterable[Any], model: Mapping[str, Any], place: int) -> Any:
    """A state_dict with the config of the first of these that has the same names and shapes; else as it is."""
    for other in others:
        with contextlib.suppress(IsomergeError):  # what is wrong with the other one is told where it is used
            known = open_checkpoint(other)
            bare = open_checkpoint(model)
            shapes, own = ({name: info.shape for name, info in one.tensors.items()} for one in (known, bare))
            if known.config and shapes == own:
                return open_checkpoint(bare, config=known.config, name=f"model {place}")
    return model


def _open(source: CheckpointSource, revision: str | None) -> Checkpoint:
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, nn.Module):
        return open_module(source)
    if isinstance(source, Mapping):
        return MemoryCheckpoint("the state_dict in memory", source, {})
    if hasattr(source, "as_checkpoint"):
        return source.as_checkpoint()
    if not isinstance(source, (str, os.PathLike)):
        raise RequestError(
            f"While opening a checkpoint: a {type(source).__name__} is neither a path, a hub id, a state_dict, an "
            f"nn.Module nor the result of a merge or an alignment. {_one_model(source)}"
        )
    text = os.fspath(source)
    if is_url(source) and not (PAGE.match(text) and "/resolve/" not in text):
        from isomerge.checkpoint.remote import open_url

        return open_url(text, revision)
    path = usable_path(source, "opening checkpoint")
    if path.is_dir():
        return _open_gguf(path / only) if (only := only_gguf(path)) else open_folder(path)
    if path.is_file():
        return _open_file(path)
    if path.is_symlink():
        raise CheckpointError(
            f"While opening checkpoint {text}: {broken_link(path)}. Repair the link, or name the model's own folder."
        )
    if isinstance(source, str) and looks_like_hub_id(text) and not text.endswith((*FILE_SUFFIXES, GGUF)):
        return open_hub(text, revision, hint=_sibling_hint(path))
    if address := PAGE.match(text):
        raise NotFoundError(
            f"While opening checkpoint {text}: it is the address of a page. Write the hub id alone, {address[1]}."
        )
    if "://" in text:
        raise NotFoundError(
            f"While opening checkpoint {without_secrets(text)}: models are read from addresses that begin with "
            f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}. Download the model, and name its folder; or write its "
            "hub id (org/name)."
        )
    base, plus, _ = text.rpartition("+")
    if plus and (Path(base).expanduser().exists() or looks_like_hub_id(base)):
        raise NotFoundError(
            f"While opening checkpoint {text}: a base with an adapter is taken by the verbs that merge, and by check. "
            f"Write it as a model first, isomerge merge {text} -o OUT, and name OUT."
        )
    raise NotFoundError(
        f"While opening checkpoint {text}: there is no such file or folder, and it does not look like a hub id "
        f"(org/name). {_sibling_hint(path)}Check the path."
    )


def _one_model(source: object) -> str:
    return "Pass one model here, and not a list." if isinstance(source, (list, tuple)) else "Pass one of these."


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in FILE_SUFFIXES:
        return open_file(path)
    if path.suffix == GGUF:
        return _open_gguf(path)
    if path.name.endswith(".index.json"):
        return open_folder(path.parent)
    if is_weight(path.name):
        raise CheckpointError(f"While opening checkpoint {path}: it is a {path.suffix} file{unreadable(path.name)}")
    if path.suffix in (".yml", ".yaml"):
        raise CheckpointError(
            f"While opening checkpoint {path}: it is a recipe, and not a model. Merge it first (isomerge merge {path} "
            "-o OUT), and name what was written."
        )
    if path.name in ("config.json", "adapter_config.json"):
        raise NotFoundError(
            f"While opening checkpoint {path}: it describes a model and holds no weights. Name its folder, "
            f"{path.parent}."
        )
    if path.suffix == ".json":
        raise CheckpointError(
            f"While opening checkpoint {path}: a .json file holds no weights. Name a safetensors file or the folder "
            "that holds the model; the manifest of an ensemble is read by isomerge ensemble."
        )
    raise CheckpointError(
        f"While opening checkpoint {path}: isomerge reads .safetensors, .gguf and .bin files, and this is "
        f"'{path.suffix or path.name}'. Name a safetensors file or the folder that holds the model."
    )


def _open_gguf(path: Path) -> Checkpoint:
    from isomerge.checkpoint.formats.gguf_open import open_gguf  # transformers, for the class that it is of

    return open_gguf(path)


def _sibling_hint(path: Path) -> str:
    """A sentence that names the nearest folder or weight file beside a path that does not exist, or nothing."""
    try:
        siblings = sorted(p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix in (*FILE_SUFFIXES, GGUF))
    except OSError:
        return ""
    hint = near_miss(path.name, siblings)
    return f"{hint} " if hint else ""
