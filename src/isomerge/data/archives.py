"""Files by name, in a folder or in an archive that is never unpacked to disk, and byte strings kept aside."""

from __future__ import annotations

import os
import tarfile
import tempfile
import threading
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from isomerge.data.base import KEPT
from isomerge.errors import RequestError

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".zip")


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
    try:
        if path.name.lower().endswith(".zip"):
            return _Zip(path, wanted)
        return _Tar(path, wanted)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise RequestError(
            f"While reading the archive {path}: {error or type(error).__name__}. It is cut short or not an archive of "
            "the kind its name says; fetch it again."
        ) from error
    except Exception as error:  # lzma and zlib have errors of their own
        if type(error).__module__ in ("_lzma", "lzma", "zlib"):
            raise RequestError(f"While reading the archive {path}: {error}. It is damaged; fetch it again.") from error
        raise


class _Folder(Files):
    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        self._path = path
        names: list[str] = []
        for folder, folders, files in os.walk(path, followlinks=True):
            folders.sort()
            relative = Path(folder).relative_to(path)
            names += [(relative / name).as_posix() for name in files]
        self.names = sorted(name for name in names if _visible(name) and wanted(name))

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()


class _Zip(Files):
    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        self._archive = zipfile.ZipFile(path)
        names = (info.filename for info in self._archive.infolist() if not info.is_dir())
        self.names = sorted(name for name in names if _visible(name) and wanted(name))

    def read(self, name: str) -> bytes:
        return self._archive.read(name)


class _Tar(Files):
    """Read once from end to end: a compressed archive cannot be entered in the middle."""

    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        self._spool = Spool()
        self._number: dict[str, int] = {}
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if member.isfile() and _visible(name) and wanted(name):
                    content = archive.extractfile(member)
                    assert content is not None  # it is a plain file
                    self._number[name] = self._spool.append(content.read())
        self.names = sorted(self._number)

    def read(self, name: str) -> bytes:
        return self._spool.read(self._number[name])


def _visible(name: str) -> bool:
    """Not what file managers leave behind."""
    return not any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
