"""Files by name, in a folder or in an archive that is never unpacked to disk, and byte strings kept aside."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import tarfile
import tempfile
import threading
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from isomerge.checkpoint.local import broken_link
from isomerge.data.base import KEPT
from isomerge.errors import IsomergeError, RequestError

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".zip")


PACKED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
"""How compressed files begin, and what opens them."""
LARGEST_FILE = 256 << 20
"""Bytes of one picture as it is stored."""
HEADERS = 4 << 20
"""Bytes that may lie between two files of a tar archive."""
SMALL_ARCHIVE, MOST_PACKED = 1 << 30, 100
"""An archive that holds more than the first is at most so many times as large as its file."""
MOST_FOLDERS = 100_000


class Spool:
    """
    >>> spool = Spool()
    >>> [spool.append(b"one"), spool.append(b"three"), spool.read(1), spool.read(0)]
    [0, 1, b'three', b'one']
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=KEPT)  # noqa: SIM115  it lives as long as the spool
        self._ends = [0]
        self._lock = threading.Lock()

    def append(self, content: bytes) -> int:
        """Returns the number under which it is kept."""
        with self._lock:
            self._file.seek(self._ends[-1])
            self._file.write(content)
            self._ends.append(self._ends[-1] + len(content))
            return len(self._ends) - 2

    def read(self, number: int) -> bytes:
        return self.slice(self._ends[number], self._ends[number + 1])

    def slice(self, start: int, stop: int) -> bytes:
        with self._lock:
            self._file.seek(start)
            return self._file.read(stop - start)

    @property
    def nbytes(self) -> int:
        return self._ends[-1]


class Files(ABC):
    """Names relative to the root, sorted, and the content of each."""

    names: list[str]

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Safe to call from several threads."""


def open_files(path: Path, wanted: Callable[[str], bool]) -> Files:
    """The wanted files under a folder or inside an archive."""
    if path.is_dir():
        return _Folder(path, wanted)
    return _Zip(path, wanted) if path.name.lower().endswith(".zip") else _Tar(path, wanted)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Damage shows anywhere in an archive, and in the classes of every library on the way."""
    try:
        yield
    except IsomergeError:
        raise
    except Exception as error:
        raise RequestError(
            f"While reading the archive {path}: {str(error) or type(error).__name__}. It is cut short, damaged or not "
            "an archive of the kind its name says; fetch it again."
        ) from error


def names_below(path: Path) -> Iterator[str]:
    """Every file under a folder, relative to it, through links too."""
    inside: dict[str, frozenset[tuple[int, int]]] = {}
    for count, (folder, folders, files) in enumerate(os.walk(path, followlinks=True)):
        folders.sort()
        state = os.stat(folder)
        above = inside.get(os.path.dirname(folder), frozenset()) if folder != str(path) else frozenset()
        here = (state.st_dev, state.st_ino)
        if here in above or count > MOST_FOLDERS:
            why = "is a link to a folder that it lies in" if here in above else f"is one of over {MOST_FOLDERS:,}"
            step = "Remove it, or name a part of the data."
            raise RequestError(f"While reading {path}: the folder {folder} {why}. {step}")
        inside[folder] = above | {here}
        relative = Path(folder).relative_to(path)
        # A link to a folder that is gone is listed as a file: a class of images would be missing in silence.
        gone = [name for name in files if "." not in name and not os.path.exists(os.path.join(folder, name))]
        if gone:
            link = Path(folder, gone[0])
            raise RequestError(f"While reading {path}: {link}: {broken_link(link)}. Repair or remove the link.")
        yield from ((relative / name).as_posix() for name in files)


class _Folder(Files):
    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        self._path = path
        self.names = sorted(name for name in names_below(path) if _visible(name) and wanted(name))

    def read(self, name: str) -> bytes:
        path = self._path / name
        try:
            _require_small(name, path.stat().st_size)
            return path.read_bytes()
        except OSError as error:
            why = broken_link(path) if path.is_symlink() else error.strerror or error
            raise RequestError(f"While reading {path}: {why}. Repair or remove it.") from error


class _Zip(Files):
    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        self._path = path
        with _reading(path):
            self._archive = zipfile.ZipFile(path)
            entries = [info for info in self._archive.infolist() if info.filename and not info.is_dir()]
            self.names = sorted({i.filename for i in entries if _visible(i.filename) and wanted(i.filename)})

    def read(self, name: str) -> bytes:
        with _reading(self._path):
            _require_small(name, self._archive.getinfo(name).file_size)
            return self._archive.read(name)


class _Tar(Files):
    """Read once from end to end: a compressed archive cannot be entered in the middle."""

    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        self._spool = Spool()
        self._number: dict[str, int] = {}
        packed, total = path.stat().st_size, 0
        with _reading(path), _unpacked(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            while (member := archive.next()) is not None:
                total += member.size
                if total > max(SMALL_ARCHIVE, MOST_PACKED * packed):
                    raise RequestError(
                        f"While reading the archive {path}: it is {packed:,} bytes long and holds more than {total:,}, "
                        "as no pictures do. Unpack it yourself if you trust it, and name the folder."
                    )
                name = member.name.removeprefix("./")
                if member.isfile() and _visible(name) and wanted(name):
                    _require_small(name, member.size)
                    content = archive.extractfile(member)
                    assert content is not None  # it is a plain file
                    self._number[name] = self._spool.append(content.read())
                stream.left = member.size + HEADERS
        self.names = sorted(self._number)

    def read(self, name: str) -> bytes:
        return self._spool.read(self._number[name])


class _Bounded(io.RawIOBase):
    """A stream that ends with an error where what lies between two files of an archive is longer than headers are."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.left = stream, HEADERS

    def read(self, size: int = -1) -> bytes:
        content = self._stream.read(size)
        self.left -= len(content)
        if self.left < 0:
            raise tarfile.TarError(f"a header in it is longer than {HEADERS >> 20} MiB")
        return content


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[_Bounded]:
    with path.open("rb") as file:
        start = file.read(6)
    opened = next((way for mark, way in PACKED.items() if start.startswith(mark)), open)
    with opened(path, "rb") as stream:
        yield _Bounded(stream)


def _require_small(name: str, size: int) -> None:
    if size > LARGEST_FILE:
        raise RequestError(
            f"While reading {name}: it is {size:,} bytes long, and pictures have at most {LARGEST_FILE:,}. Remove it."
        )


def _visible(name: str) -> bool:
    """Not what file managers leave behind."""
    return not any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
