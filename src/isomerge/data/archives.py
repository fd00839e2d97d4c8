"""Files by name, in a folder or in an archive that is never unpacked to disk."""

from __future__ import annotations

import os
import tarfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from isomerge.data.spool import Spool
from isomerge.errors import RequestError

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".zip")


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
        found = []
        for folder, folders, files in os.walk(path, followlinks=True):
            folders.sort()
            relative = Path(folder).relative_to(path)
            found += [(relative / name).as_posix() for name in files]
        self.names = sorted(name for name in found if _visible(name) and wanted(name))

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
