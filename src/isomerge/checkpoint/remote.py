"""Checkpoints behind a URL: headers when opened, then the bytes of each tensor as it is read.

Nothing of the weights is kept on disk. What lies beside them is fetched into a temporary folder of this process, so
that everything that looks for a config or a tokenizer finds a folder.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from isomerge.addresses import scheme_of, usable_url
from isomerge.checkpoint.base import WeightFile, failure
from isomerge.checkpoint.config import config_problems
from isomerge.checkpoint.header import HeaderError
from isomerge.checkpoint.identity import described
from isomerge.checkpoint.local import SINGLE_OR_INDEX, FileCheckpoint, assign_tensors, read_config, read_index
from isomerge.checkpoint.remote_file import RemoteFile
from isomerge.checkpoint.remote_store import FsspecFolder, RemoteFolder, RemoteStamp, open_store, unreachable
from isomerge.checkpoint.side_files import choose_side_files, module_folders
from isomerge.choices import STAGING
from isomerge.errors import CheckpointError, NotFoundError, RequestError

MARKER = f"{STAGING}/upload.json"
"""Beside a model: its upload has not ended."""
FIRST = ("config.json", "adapter_config.json", "README.md", "modules.json")
"""Fetched when a model is opened."""
ADAPTER = "adapter_model.safetensors"
# What a web server, which lists nothing, is asked for.
BESIDE = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "LICENSE", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("1_Pooling/config.json", "isomerge.lock.json", "isomerge.json", "mergekit_config.yml"),
)  # fmt: skip


class RemoteCheckpoint(FileCheckpoint):
    """A model's folder in a store, or one file of it."""

    folder: Path

    def __init__(
        self,
        name: str,
        files: Mapping[str, WeightFile],
        store: RemoteFolder,
        stamps: dict[str, RemoteStamp],
        *,
        config: dict[str, Any],
        folder: Path,
        revision: str | None,
        alone: bool,
    ) -> None:
        """`alone`: a single file without a config beside it, and so without side files."""
        super().__init__(name, files, config=config, folder=folder, revision=revision, side_files=list)
        self.store, self.stamps, self._alone = store, stamps, alone
        self._fetched = {file.label for file in files.values()} | {name for name in FIRST if name in stamps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self.folder.is_dir():  # on another machine
            self.folder = _side_folder(self.name, self.stamps)
            _fetch(self.store, self.folder, self.stamps, FIRST)

    def identity(self) -> Any:
        if self.revision is not None:
            return self.revision
        files = {file.label: file.identity() for file in self._files.values()}
        return None if None in files.values() else {"weights": sorted(files.items()), "beside": described(self)}

    def names(self) -> list[str]:
        return sorted(name for name in self.stamps if "/" not in name)

    def changed(self) -> list[Path | str]:
        if self.revision is not None:
            return []
        known = sorted(self._fetched)
        now = self.store.stamps(known)
        return [self.store.address(name) for name in known if now.get(name) != self.stamps[name]]

    def side_files(self) -> list[Path]:
        return [] if self._alone else self.fetch(self._beside())

    def _beside(self) -> list[str]:
        self.stamps |= self.store.stamps(name for name in BESIDE if name not in self.stamps) if self._asks else {}
        return choose_side_files(self.stamps, module_folders(self.folder / "modules.json"))

    @property
    def _asks(self) -> bool:
        """Whether files must be asked for by name, since nothing lists them."""
        return not isinstance(self.store, FsspecFolder)

    def fetch(self, names: Iterable[str]) -> list[Path]:
        """Files beside the weights, in the local folder."""
        found = _fetch(self.store, self.folder, self.stamps, names)
        self._fetched |= {path.relative_to(self.folder).as_posix() for path in found}
        return found

    def stored(self) -> dict[str, list[Any]]:
        stamps = {file.label: self.stamps[file.label] for file in self._files.values()}
        return {label: [stamp.size, stamp.tag] for label, stamp in sorted(stamps.items())}


def open_url(given: str, revision: str | None = None) -> RemoteCheckpoint:
    """Open every header of a folder, or of a file, behind a URL; whatever is wrong is told at once."""
    url = usable_url(given, "opening checkpoint")
    act = f"opening checkpoint {url}"
    root, single = url, None
    if PurePosixPath(url).suffix == ".gguf":
        raise RequestError(f"While {act}: GGUF is read from files on this machine. Download it, and name the file.")
    if PurePosixPath(url).suffix in (".safetensors", ".bin", ".pt", ".pth"):
        root, _, single = url.rpartition("/")
    store, commit = _store(root, revision, act)
    stamps = _inside(store.stamps([MARKER, *FIRST, *SINGLE_OR_INDEX, ADAPTER, *([single] if single else [])]))
    if MARKER in stamps and single is None:
        raise CheckpointError(
            f"While {act}: the upload that was to fill this folder was interrupted, so it is incomplete. Run the "
            "command that wrote it again."
        )
    weights = single if single in stamps else _weights_among(stamps, act) if single is None else None
    if weights is None or weights not in stamps:
        raise NotFoundError(f"While {act}: there is no such file, or it may not be read. Check the address.")
    folder = _side_folder(root, stamps)
    first = [name for name in (*FIRST, weights) if name.endswith((".json", ".md"))]
    if any(name in stamps for name in SINGLE_OR_INDEX):
        first = [name for name in first if name != "adapter_config.json"]  # or the folder would look like an adapter's
    _fetch(store, folder, stamps, first)
    problems: list[str] = []
    config = read_config(folder / "config.json", problems)
    weight_map = read_index(folder / weights, problems) if weights.endswith(".index.json") else None
    files = assign_tensors(_headers(store, stamps, weights, weight_map, problems), weight_map, problems)
    problems += config_problems(config, len(files))
    if problems:
        raise failure(act, problems, "Upload the named files again, then run again.")
    return RemoteCheckpoint(
        url, files, store, stamps, config=config, folder=folder, revision=commit, alone=bool(single) and not config
    )


def _store(root: str, revision: str | None, act: str) -> tuple[RemoteFolder, str | None]:
    """The store, and the commit that it is read at: what is on the hub may change under a branch's name."""
    if scheme_of(root) != "hf":
        if revision is not None:
            raise RequestError(f"While {act}: revision '{revision}' was asked for, and only the hub has revisions.")
        return open_store(root), None
    store = open_store(root)
    assert isinstance(store, FsspecFolder)
    try:
        return store.at_commit(revision)
    except Exception as error:  # of the hub and of the network
        raise unreachable(act, error) from None


def _inside(stamps: Mapping[str, RemoteStamp]) -> dict[str, RemoteStamp]:
    """Without names that would leave the folder they are fetched into: a store may hold any name."""
    return {
        name: stamp
        for name, stamp in stamps.items()
        if not PureWindowsPath(name).anchor and not name.startswith("/") and ".." not in PureWindowsPath(name).parts
    }


def _weights_among(stamps: Mapping[str, RemoteStamp], act: str) -> str:
    for name in SINGLE_OR_INDEX:
        if name in stamps:
            return name
    others = [name for name in stamps if name.endswith(".safetensors") and "/" not in name]
    if len(others) == 1:
        return others[0]
    if not stamps:
        raise NotFoundError(f"While {act}: there is no such folder, or it may not be read. Check the address.")
    raise CheckpointError(
        f"While {act}: it has no model.safetensors and no index among its files. Name the folder of a model, or a "
        "safetensors file."
    )


def _headers(
    store: RemoteFolder,
    stamps: dict[str, RemoteStamp],
    weights: str,
    weight_map: Mapping[str, str] | None,
    problems: list[str],
) -> dict[str, WeightFile]:
    shards = [weights] if weight_map is None else sorted(set(weight_map.values()))
    if unknown := [shard for shard in shards if shard not in stamps]:
        stamps |= _inside(store.stamps(unknown))
    opened: dict[str, WeightFile] = {}
    with ThreadPoolExecutor(max_workers=8) as pool:
        for shard, future in [(shard, pool.submit(_open, store, stamps, shard)) for shard in shards]:
            try:
                opened[shard] = future.result()
            except HeaderError as error:
                problems.append(f"{shard}: {error}")
    return opened


def _open(store: RemoteFolder, stamps: Mapping[str, RemoteStamp], shard: str) -> WeightFile:
    if shard not in stamps:
        raise HeaderError("named by the index but not in the folder")
    if not shard.endswith(".safetensors"):
        raise HeaderError("it is a pickle, which has no header to read first; download the model and name its folder")
    return RemoteFile(store, shard, stamps[shard])


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """One folder for all that this process fetches; it goes away with the process."""
    return tempfile.TemporaryDirectory(prefix="isomerge-remote-")


def _side_folder(url: str, stamps: Mapping[str, RemoteStamp]) -> Path:
    """Where the side files of this version of a folder lie."""
    key = hashlib.sha256(repr((url, sorted(stamps.items()))).encode()).hexdigest()[:16]
    folder = Path(_temporary().name, key, re.sub(r"[^\w.-]", "_", PurePosixPath(url).name) or "model")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_fetching = threading.Lock()


def _fetch(store: RemoteFolder, folder: Path, stamps: Mapping[str, RemoteStamp], names: Iterable[str]) -> list[Path]:
    """Those of the files that are there, in the local folder."""
    found = []
    with _fetching:
        for name in (one for one in dict.fromkeys(names) if one in stamps):
            path = folder / name
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(store.fetch(name, stamps[name]))
            found.append(path)
    return found
