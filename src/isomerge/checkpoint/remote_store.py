"""A folder behind a URL: which files it has, and byte ranges of them, asked for again after a passing failure."""

from __future__ import annotations

import importlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from isomerge.addresses import scheme_of
from isomerge.errors import CheckpointError, NotFoundError
from isomerge.json_files import LARGEST
from isomerge.packages import why_not_imported
from isomerge.text import without_secrets

PART = 4 << 20
"""Bytes of one request."""
TOGETHER = 8
"""Requests at once for one read: with what is copied out of them, the most a read holds beside its result."""
PAUSES = (0.3, 1.0, 3.0, 9.0)
"""Seconds before a failed request is made again."""
MOST_FILES = 10_000

Result = TypeVar("Result")
PERMANENT = (FileNotFoundError, PermissionError, NotImplementedError, ImportError, TypeError, ValueError)


class RefusedError(OSError):
    """An answer that will be the same the next time."""


@dataclass(frozen=True)
class RemoteStamp:
    """A file as its server describes it; `tag` is an ETag, a checksum or a time, None where it says none."""

    size: int
    tag: str | None


class RemoteFolder(ABC):
    """What a store must be able to do."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def stamps(self, asked: Iterable[str]) -> dict[str, RemoteStamp]:
        """The files that are there now; where nothing can be listed, those of the ones asked for."""

    @abstractmethod
    def _pieces(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Any]:
        """The bytes of each span, or the exception that came instead. At most as many bytes as were asked for."""

    def address(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read(self, name: str, places: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each view with the file's bytes from its place on. Raises OSError after the last attempt."""
        parts = [(start + b, view[b : b + PART]) for start, view in places for b in range(0, len(view), PART)]
        for first in range(0, len(parts), TOGETHER):
            self._fill(name, parts[first : first + TOGETHER])

    def _fill(self, name: str, left: list[tuple[int, memoryview]]) -> None:
        for pause in (*PAUSES, None):
            pieces = self._pieces(name, [(start, start + len(view)) for start, view in left])
            failed, cause = [], None
            for (start, view), piece in zip(left, pieces, strict=True):
                if isinstance(piece, bytes) and len(piece) == len(view):
                    view[:] = piece
                else:
                    failed.append((start, view))
                    cause = piece if isinstance(piece, BaseException) else _cut(len(piece), len(view))
            if cause is None:
                return
            if pause is None or isinstance(cause, (RefusedError, *PERMANENT)):
                raise OSError(cause_of(cause)) from None
            left = failed
            time.sleep(pause)

    def fetch(self, name: str, stamp: RemoteStamp) -> bytes:
        """A whole file beside the weights."""
        if stamp.size > LARGEST:
            raise CheckpointError(
                f"While fetching {self.address(name)}: it has {stamp.size:,} bytes, and a file beside the weights may "
                f"have {LARGEST:,}. Check what it is."
            )
        content = bytearray(stamp.size)
        try:
            self.read(name, [(0, memoryview(content))])
        except OSError as error:
            raise unreachable(f"fetching {self.address(name)}", error) from None
        return bytes(content)


def _cut(got: int, wanted: int) -> OSError:
    return OSError(f"the answer ended {wanted - got:,} bytes early" if got < wanted else "the answer is too long")


def cause_of(error: BaseException) -> str:
    """Why a request failed, in one line without secrets: errors of stores may repeat a signed address."""
    text = without_secrets((str(error).strip().splitlines() or [""])[0])[:200].rstrip(".")
    if isinstance(error, FileNotFoundError):
        return "there is no such file or folder"
    if isinstance(error, PermissionError):
        return f"access is denied ({text})"
    return text or type(error).__name__


def unreachable(act: str, error: BaseException) -> CheckpointError:
    """Without its cause: a traceback would show what messages leave out."""
    kind = NotFoundError if isinstance(error, FileNotFoundError) else CheckpointError
    return kind(
        f"While {act}: {cause_of(error)}. Check the address, the network and the credentials, then run again; "
        "docs/remote.md says where each store looks for them."
    )


PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}


class FsspecFolder(RemoteFolder):
    """s3://, gs:// and hf://, through the file systems of fsspec."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.scheme = scheme_of(url)
        self._root = url.partition("://")[2]
        self._made: tuple[int, Any] | None = None
        self.files()

    def files(self) -> Any:
        """The file system, made anew in a process that was forked."""
        if self._made is None or self._made[0] != os.getpid():
            self._made = os.getpid(), self._file_system()
        return self._made[1]

    def _file_system(self) -> Any:
        package = PACKAGES[self.scheme]
        try:
            importlib.import_module(package)
            import fsspec
        except ImportError as error:
            raise CheckpointError(
                f"While opening {self.url}: {why_not_imported(package, error)}.", module=package
            ) from error
        settings: dict[str, Any] = {}
        if self.scheme == "hf":
            from huggingface_hub import constants

            settings = {"endpoint": constants.ENDPOINT, "skip_instance_cache": True}
        return fsspec.filesystem(self.scheme, **settings)

    def at_commit(self, revision: str | None) -> tuple[FsspecFolder, str]:
        """A folder of the hub at the commit that its branch means now."""
        from huggingface_hub import HfApi, constants

        place = self.files().resolve_path(self._root, revision=revision)
        info = HfApi(endpoint=constants.ENDPOINT).repo_info(
            place.repo_id, repo_type=place.repo_type, revision=place.revision
        )
        inside = f"/{place.path_in_repo}" if place.path_in_repo else ""
        kind = "" if place.repo_type == "model" else f"{place.repo_type}s/"
        return FsspecFolder(f"hf://{kind}{place.repo_id}@{info.sha}{inside}"), str(info.sha)

    def stamps(self, asked: Iterable[str]) -> dict[str, RemoteStamp]:
        def find(files: Any) -> dict[str, Any]:
            files.invalidate_cache()
            return dict(files.find(self._root, maxdepth=2, detail=True))

        found = self._tried(f"listing {self.url}", find)
        if len(found) > MOST_FILES:
            raise CheckpointError(
                f"While listing {self.url}: it has {len(found):,} files, so it is no model's folder. Name that one."
            )
        inside = {path[len(self._root) :].lstrip("/"): info for path, info in found.items()}
        return {name: RemoteStamp(int(info["size"] or 0), tag_of(info)) for name, info in inside.items() if name}

    def _tried(self, act: str, work: Callable[[Any], Result]) -> Result:
        """The work on the file system, again after a passing failure."""
        for pause in PAUSES:
            try:
                return work(self.files())
            except Exception as error:  # each store and the network have their own classes
                if isinstance(error, PERMANENT) or "redential" in type(error).__name__:
                    raise unreachable(act, error) from None
                time.sleep(pause)
        try:
            return work(self.files())
        except Exception as error:
            raise unreachable(act, error) from None

    def path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _pieces(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Any]:
        files, path = self.files(), self.path(name)
        if files.async_impl:
            starts, ends = [start for start, _ in spans], [end for _, end in spans]
            return list(files.cat_ranges([path] * len(spans), starts, ends, on_error="return"))
        return [_caught(files, path, start, end) for start, end in spans]


def _caught(files: Any, path: str, start: int, end: int) -> Any:
    try:
        # Without a cache: it would fetch more than was asked for.
        return files.cat_file(path, start=start, end=end, cache_type="none")
    except Exception as error:
        return error


def tag_of(info: dict[str, Any]) -> str | None:
    """What changes with a file's content, in the words of each store."""
    lfs = info.get("lfs") or {}
    for value in (info.get("ETag"), info.get("etag"), lfs.get("sha256"), info.get("blob_id"), info.get("LastModified")):
        if value:
            return str(value).strip('"')
    return None


def open_store(url: str) -> RemoteFolder:
    if scheme_of(url) in ("http", "https"):
        from isomerge.checkpoint.http_store import HttpFolder

        return HttpFolder(url)
    return FsspecFolder(url)
