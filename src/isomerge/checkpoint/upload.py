"""Write a model to a URL: into a folder of this machine first, with all that a crash needs, then object by object.

An object store has no rename. So a marker lies beside the objects for as long as an upload lasts, config.json, without
which nothing takes a folder for a model, is deleted first and written last, and a list on this machine says which
objects have arrived. A run that was killed goes on where it was: in the merge by its journal, then by that list.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import Any

from isomerge import system
from isomerge.addresses import WRITABLE, scheme_of, usable_url
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.object_store import ObjectStore
from isomerge.checkpoint.remote import MARKER
from isomerge.checkpoint.remote_store import RemoteStamp
from isomerge.checkpoint.renaming import LAST, SIDE, STALE
from isomerge.checkpoint.side_files import files_below, is_weight
from isomerge.checkpoint.stamp import Stamp
from isomerge.checkpoint.writer import Written
from isomerge.errors import CheckpointError, RequestError
from isomerge.json_files import JsonError, read_json

ARRIVED = "arrived.json"


def local_place(url: str | os.PathLike[str]) -> Path:
    """The folder of this machine in which a model for this URL is written: the same for every run, in TMPDIR."""
    usable = usable_url(url, "preparing to write")
    key = hashlib.sha256(usable.encode()).hexdigest()[:16]
    own = system.own_temporary_folder()
    if own is None:
        raise CheckpointError(
            f"While preparing to write {usable}: the folder for it in {tempfile.gettempdir()} is not yours, or others "
            "can write to it. Set TMPDIR to a folder of your own."
        )
    return own / key / (PurePosixPath(usable).name or "model")


class Upload:
    """`folder` is to be filled with a model, which `run` then copies to the URL."""

    def __init__(self, url: str | os.PathLike[str], *, force: bool) -> None:
        self.url = usable_url(url, "preparing to write")
        if scheme_of(self.url) not in WRITABLE:
            instead = "name a folder, then push it to the hub" if scheme_of(self.url) == "hf" else "name a folder"
            raise RequestError(
                f"While preparing to write {self.url}: only {' and '.join(f'{one}://' for one in WRITABLE)} can be "
                f"written to; {instead}."
            )
        self.folder = local_place(self.url)
        self._store = ObjectStore(self.url)
        self._force = force
        self._list = self.folder.parent / ARRIVED
        self._arrived = _read_list(self._list)

    def require_free(self) -> dict[str, RemoteStamp]:
        """What is there now; an error if it is neither nothing, nor unfinished, nor ours, nor to be replaced."""
        there = self._store.stamps(())
        ours = {name: RemoteStamp(*entry["remote"]) for name, entry in self._arrived.items()}
        if not self._force and MARKER not in there and any(ours.get(name) != stamp for name, stamp in there.items()):
            raise RequestError(
                f"While preparing to write {self.url}: there are objects already, and nothing is overwritten unasked. "
                "Name another address, or set force to replace the model there.",
                keys=("force",),
            )
        return there

    def run(self, progress: Progress | None = None) -> None:
        """Copy what has not arrived. Whenever this stops, what is there is the old model, the new one, or none."""
        there = self.require_free()
        files = {path.relative_to(self.folder).as_posix(): path for path in files_below(self.folder)}
        files = {name: path for name, path in files.items() if not name.startswith(".")}
        order = sorted(files, key=_rank)
        left = [name for name in order if not self._has_arrived(name, files[name], there.get(name))]
        if left:  # then config.json is written anew, so that it is the last
            left = [name for name in order if name in left or name in LAST]
        if left or MARKER in there:
            self._begin(order, left, there)
            self._put(left, files, progress)
            self._store.delete(MARKER)

    def _begin(self, order: list[str], left: list[str], there: Mapping[str, RemoteStamp]) -> None:
        """From here on nothing takes what is there for a model, until the last object has arrived."""
        self._store.write(MARKER, json.dumps({"format": 1, "files": order}).encode())
        self._store.abort_unfinished(order)
        old = [name for name in there if name in left or (name not in order and _is_of_a_model(name))]
        for name in sorted(old, key=_rank, reverse=True):  # config.json first, then the index
            if name in LAST or name.endswith(".index.json") or name not in order:
                self._store.delete(name)
        self._arrived = {name: entry for name, entry in self._arrived.items() if name in order and name not in left}

    def _put(self, left: list[str], files: Mapping[str, Path], progress: Progress | None) -> None:
        total, done = sum(files[name].stat().st_size for name in left), 0
        checked = False
        for name in left:
            if name in LAST and not checked:
                self._require_all(files)
                checked = True
            path = files[name]
            before = Stamp.of(path)

            def tell(count: int, done: int = done, name: str = name) -> None:
                if progress:
                    progress(done + count, total, f"uploading {name}")

            remote = self._store.upload(path, name, tell)
            if before is None or remote.size != before.size or Stamp.of(path) != before:
                raise CheckpointError(
                    f"While uploading {name} to {self.url}: {remote.size:,} bytes arrived of {path.stat().st_size:,}. "
                    "Run the same command again."
                )
            self._arrived[name] = {"local": list(asdict(before).values()), "remote": [remote.size, remote.tag]}
            _write_list(self._list, self._arrived)
            done += before.size

    def _require_all(self, files: Mapping[str, Path]) -> None:
        """Every object but the last is there, as it was sent, and no weights of another model are."""
        there = self._store.stamps(())
        known = {name: RemoteStamp(*entry["remote"]) for name, entry in self._arrived.items()}
        wrong = [name for name in files if name not in LAST and (name not in known or there.get(name) != known[name])]
        wrong += [name for name in there if name not in files and name != MARKER and _is_of_a_model(name)]
        if wrong:
            raise CheckpointError(
                f"While uploading to {self.url}: {wrong[0]} is not as it was sent, so somebody else writes there too. "
                "The model was left unfinished; wait for the other run, then run the same command again."
            )

    def _has_arrived(self, name: str, path: Path, there: RemoteStamp | None) -> bool:
        entry, stamp = self._arrived.get(name), Stamp.of(path)
        if entry is None or there is None or stamp is None:
            return False
        return bool(entry["local"] == list(asdict(stamp).values()) and RemoteStamp(*entry["remote"]) == there)

    def forget(self) -> None:
        """The local copy has served."""
        shutil.rmtree(self.folder.parent, ignore_errors=True)

    def shown(self, path: str | os.PathLike[str]) -> str:
        """The address of what was written at this place of the local folder."""
        inside = os.path.relpath(path, self.folder)
        return self.url if inside == "." else f"{self.url}/{Path(inside).as_posix()}"

    def described(self, written: Written) -> Written:
        """What is now at the URL."""
        files = tuple(Path(self.shown(path)) for path in written.files)
        return replace(written, out=Path(self.url), files=files, url=self.url)


@contextlib.contextmanager
def uploading(url: str | os.PathLike[str], *, force: bool) -> Iterator[Upload]:
    """A folder to fill and to `run`; forgotten once all has gone well, kept for the next run otherwise."""
    upload = Upload(url, force=force)
    upload.require_free()
    place = upload.folder.parent
    place.mkdir(exist_ok=True)
    try:
        lock = system.lock_folder(place)
    except BlockingIOError as error:
        raise CheckpointError(
            f"While preparing to write {upload.url}: another process is writing it. Wait until it has finished."
        ) from error
    try:
        yield upload
        upload.forget()
    finally:
        os.close(lock)
        with contextlib.suppress(OSError):
            for folder in (upload.folder, place):  # where nothing was kept
                folder.rmdir()


def save_to_url(
    save: Callable[..., Written], url: str | os.PathLike[str], *, force: bool, progress: Progress | None, **options: Any
) -> Written:
    """What `save` does for a folder, for a URL."""
    with uploading(url, force=force) as upload:
        written = save(upload.folder, force=force, finish=False, **options)
        upload.run(progress)
        return upload.described(written)


def _rank(name: str) -> tuple[int, str]:
    """Weights first, then what lies beside them, then the index, and last what makes them a model."""
    kind = 3 if name in LAST else 2 if name.endswith(".index.json") else 0 if is_weight(name) else 1
    return kind, name


def _is_of_a_model(name: str) -> bool:
    """Beside another model's weights it would be wrong."""
    return "/" not in name and (STALE.fullmatch(name) or SIDE.fullmatch(name)) is not None


def _read_list(path: Path) -> dict[str, Any]:
    """A list that is damaged says nothing: everything is sent again."""
    try:
        known = read_json(path)
        return {
            str(name): {"local": [int(one) for one in entry["local"]], "remote": list(entry["remote"][:2])}
            for name, entry in known.items()
        }
    except (OSError, JsonError, AttributeError, KeyError, TypeError, ValueError):
        return {}


def _write_list(path: Path, known: Mapping[str, Any]) -> None:
    aside = path.with_name(path.name + ".partial")
    with aside.open("wb") as file:
        file.write(json.dumps(known).encode())
        system.sync(file)
    os.replace(aside, path)
