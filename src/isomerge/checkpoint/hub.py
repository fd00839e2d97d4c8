"""Checkpoints on the Hugging Face hub: headers when opened, weights on the first read.

Every request goes through huggingface_hub, so HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are obeyed.
"""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isomerge.checkpoint.base import Checkpoint, TensorInfo, WeightFile, failure, first_line
from isomerge.checkpoint.files import SafetensorsFile
from isomerge.checkpoint.header import DTYPES, HeaderError
from isomerge.checkpoint.local import (
    SINGLE_OR_INDEX,
    FileCheckpoint,
    assign_tensors,
    open_folder,
    read_config,
    read_index,
)
from isomerge.checkpoint.side_files import choose_side_files, module_folders
from isomerge.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def looks_like_hub_id(source: str) -> bool:
    """
    >>> looks_like_hub_id("org/name"), looks_like_hub_id("./name"), looks_like_hub_id("a/b/c")
    (True, False, False)
    """
    return HUB_ID.fullmatch(source) is not None and ".." not in source and "--" not in source


class HubFile(WeightFile):
    """A safetensors file of which only the header has been fetched; the first read downloads it."""

    def __init__(self, repo: str, label: str, commit: str) -> None:
        self.label = label
        self._repo, self._commit = repo, commit
        self._lock = threading.Lock()  # several threads may want the first tensor of one file
        cached = _cached(repo, label, commit)
        self._file = SafetensorsFile(cached) if cached else None
        self.tensors: Mapping[str, TensorInfo] = (
            self._file.tensors if self._file else _remote_header(repo, label, commit)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_file": None}  # found in the cache again at the next read

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_lock": threading.Lock()}

    def read(self, name: str) -> torch.Tensor:
        return self._local(name).read(name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._local(name).read_rows(name, start, stop)

    def read_span(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._local(name).read_span(name, start, stop)

    def _local(self, tensor: str) -> SafetensorsFile:
        with self._lock:
            if self._file is None:
                self._file = self._fetch(tensor)
        return self._file

    def _fetch(self, tensor: str) -> SafetensorsFile:
        try:
            file = SafetensorsFile(_download(self._repo, self.label, self._commit))
            if dict(file.tensors) != dict(self.tensors):
                raise HeaderError("its header is not the one that the hub announced")
        except HeaderError as error:
            raise failure(
                f"reading tensor '{tensor}' of {self._repo}",
                [f"{self.label}: {error}"],
                "Remove the file from the hub cache and run again.",
            ) from error
        return file


def open_hub(repo: str, revision: str | None, *, hint: str = "") -> Checkpoint:
    """Resolve the revision to a commit, then read config, index and headers. `hint` names what else may be meant."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    act = f"opening hub checkpoint {repo}" + (f" at revision '{revision}'" if revision else "")
    try:
        commit, names = _list_files(repo, revision)
    except GatedRepoError as error:
        raise CheckpointError(
            f"While {act}: its owner gives access on request only. Accept the conditions on its page, then log in with "
            "`hf auth login` or set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"While {act}: the repository has no such branch, tag or commit. Leave the revision out to take 'main'."
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"While {act}: the hub has no such public model and there is no such folder here. {hint}"
            "Check the spelling; if the model is private, log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except Exception as error:  # offline by wish or by accident: the cache is all there is
        return _open_cached(repo, revision, act, error, hint)
    return _open_online(repo, commit, names, act)


def _list_files(repo: str, revision: str | None) -> tuple[str, list[str]]:
    """The commit and all its file names; raises when offline, before any request is made."""
    from huggingface_hub import HfApi, constants, errors, hf_hub_download

    if constants.HF_HUB_OFFLINE:
        raise errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    info = HfApi().model_info(repo, revision=revision)
    names = sorted(sibling.rfilename for sibling in info.siblings or [])
    if info.sha is None:
        raise CheckpointError(f"While opening hub checkpoint {repo}: the hub did not say which commit it serves.")
    if "config.json" in names and revision != info.sha:
        # Asked for under the branch's name, so that the cache learns which commit the branch means, for offline use.
        hf_hub_download(repo, "config.json", revision=revision)
    return info.sha, names


def _open_online(repo: str, commit: str, names: list[str], act: str) -> Checkpoint:
    weights = next((name for name in SINGLE_OR_INDEX if name in names), None)
    if weights is None:
        others = [name for name in names if name.endswith(".safetensors") and "/" not in name]
        if len(others) != 1:
            raise CheckpointError(
                f"While {act}: the repository has no model.safetensors, no index and no pytorch_model.bin "
                f"among its {len(names)} files. Name a repository with safetensors weights, or download one file of it."
            )
        weights = others[0]
    problems: list[str] = []
    try:
        config: dict[str, Any] = {}
        if "config.json" in names:
            config = read_config(_download(repo, "config.json", commit), problems)
        weight_map: dict[str, str] | None = None
        if weights.endswith(".index.json"):
            weight_map = read_index(_download(repo, weights, commit), problems)
        shards = sorted(set(weight_map.values())) if weight_map is not None else [weights]
        missing = [shard for shard in shards if shard not in names]
        problems.extend(f"{shard}: named by {weights} but not in the repository" for shard in missing)
        shards = [shard for shard in shards if shard not in missing]
        if any(shard.endswith(".bin") for shard in shards):
            # A pickle has no header at its front, so it has to come down before anything is known about it.
            for shard in shards:
                _download(repo, shard, commit)
            return open_folder(_snapshot(repo, commit), name=repo, revision=commit)
        opened = _open_headers(repo, commit, shards, problems)
    except CheckpointError:
        raise
    except Exception as error:
        raise failure(
            act, [f"a request to the hub failed ({first_line(error)})"], "Check the network and run again."
        ) from error
    files = assign_tensors(opened, weight_map, problems)
    if problems:
        raise failure(act, problems, "Tell the repository's owner, or name an earlier revision.")
    return FileCheckpoint(
        repo,
        files,
        config=config,
        folder=_snapshot(repo, commit),
        revision=commit,
        side_files=partial(_side_files, repo, commit, names),
    )


def _open_headers(repo: str, commit: str, shards: list[str], problems: list[str]) -> dict[str, WeightFile]:
    opened: dict[str, WeightFile] = {}
    with ThreadPoolExecutor(max_workers=8) as pool:
        for shard, future in [(shard, pool.submit(HubFile, repo, shard, commit)) for shard in shards]:
            try:
                opened[shard] = future.result()
            except HeaderError as error:
                problems.append(f"{shard}: {error}")
    return opened


def _open_cached(repo: str, revision: str | None, act: str, error: Exception, hint: str) -> Checkpoint:
    download = shlex.join(["hf", "download", repo, *(["--revision", revision] if revision else [])])
    fix = f"Check the spelling; or run `{download}` where there is a network (or unset HF_HUB_OFFLINE), then run again."
    for name in ("config.json", *SINGLE_OR_INDEX):
        cached = _cached(repo, name, revision)
        if cached is not None:
            return open_folder(cached.parent, name=repo, revision=cached.parent.name, next_step=fix)
    raise CheckpointError(
        f"While {act}: the hub cannot be reached ({first_line(error)}), the model is not in the local cache, and "
        f"there is no folder of that name. {hint}{fix}"
    ) from error


def _remote_header(repo: str, name: str, commit: str) -> dict[str, TensorInfo]:
    from huggingface_hub import HfApi, errors

    try:
        header = HfApi().parse_safetensors_file_metadata(repo, name, revision=commit)
    except errors.SafetensorsParsingError as error:
        raise HeaderError(f"its header is corrupt ({first_line(error)})") from error
    unknown = [tensor for tensor, info in header.tensors.items() if info.dtype not in DTYPES]
    if unknown:
        dtype = header.tensors[unknown[0]].dtype
        raise HeaderError(f"tensor '{unknown[0]}' is stored as {dtype}, which isomerge cannot read")
    return {tensor: TensorInfo(tuple(info.shape), DTYPES[info.dtype]) for tensor, info in header.tensors.items()}


def _side_files(repo: str, commit: str, names: list[str]) -> list[Path]:
    modules = module_folders(_download(repo, "modules.json", commit)) if "modules.json" in names else []
    return [_download(repo, name, commit) for name in choose_side_files(names, modules)]


def _download(repo: str, name: str, commit: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, name, revision=commit))
    except Exception as error:  # network, disk and permission failures come in many classes
        raise CheckpointError(
            f"While fetching {name} of hub checkpoint {repo} (commit {commit}): {first_line(error)}. "
            "What has arrived is kept: check the network and the room in the hub cache, then run again."
        ) from error


def _cached(repo: str, name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repo, name, revision=revision)
    return Path(path) if isinstance(path, str) else None


def _snapshot(repo: str, commit: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "snapshots" / commit
