"""Fill a folder so that an unfinished one is never mistaken for a model.

Everything is written into a hidden folder inside the output and renamed at the end, config.json last. A run that is
killed leaves that folder with a journal; the same run, made again, goes on from there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from isomerge import system
from isomerge.addresses import is_url, usable_url
from isomerge.checkpoint.base import Checkpoint
from isomerge.checkpoint.journal import JOURNAL, Journal, JournalLine
from isomerge.checkpoint.permissions import restrict
from isomerge.checkpoint.renaming import LAST, Renaming, sync_folders
from isomerge.choices import STAGING
from isomerge.errors import CheckpointError, RequestError

SOLVED = ".solved"
"""In the staging folder: what was solved before the first tensor was written."""


ASIDE_OF_REPORTS = ".*.partial"
"""What a run that was killed while it wrote its report has left beside the weights."""


def was_interrupted(folder: Path) -> bool:
    """Whether a write into this folder stopped midway. A forced write that stopped before it replaced anything leaves
    the older model complete, and one that stopped after its last rename has written the new one."""
    staged = folder / STAGING
    if not any(path.is_file() for path in staged.rglob("*")):
        return False
    journal = Journal(staged)
    if journal.commit is not None:
        return not Renaming(folder, staged).is_over(journal.commit)
    return not any((folder / name).exists() for name in LAST)


def is_unfinished(folder: Path) -> bool:
    """Whether the model is complete, and the run that wrote it was stopped before its very end."""
    journal = Journal(folder / STAGING)
    return journal.commit is not None and Renaming(folder, folder / STAGING).is_over(journal.commit)


def finish_output(out: Path) -> None:
    """Forget how a complete model was written; the journal goes last, since it says that the model is complete."""
    folder = out / STAGING
    with contextlib.suppress(OSError):
        for path in out.glob(ASIDE_OF_REPORTS):
            path.unlink()
    _empty(folder, keep=(JOURNAL,))
    with contextlib.suppress(OSError):
        (folder / JOURNAL).unlink(missing_ok=True)
        folder.rmdir()


class Staging:
    """`with Staging(out, force=False) as staging:` stage files, then commit. Any exception undoes it all, except that
    an interruption keeps what a run with the same `key` can go on from."""

    def __init__(
        self,
        out: Path,
        *,
        force: bool,
        key: str | None = None,
        solved: str | None = None,
        finish: bool = True,
        closed: int = 0,
    ) -> None:
        """`key` names the work: the staged files of a run that was killed are kept for one that has the same.

        `solved` is the key of what this run has solved beforehand and kept beside them. Without `finish`, the journal
        stays after a commit, so that the same run can be made again if what follows is stopped; `finish_output` ends
        it. `closed` are the permission bits that nothing here may have.
        """
        self.out = out
        self.is_done = False
        """A run with the same key has committed already, and was stopped before its end."""
        self.folder = out / STAGING
        self._key, self._solved, self._finish, self._force = key, solved, finish, force
        self._closed = closed
        self._staged: list[str] = []
        self._created: list[Path] = []
        self._lock: int | None = None
        self._is_committed = self._is_unsettled = False
        _refuse_occupied(out, force)

    def __enter__(self) -> Staging:
        try:
            self._make_folders()
            self._lock = _lock_folder(self.folder)
            self._journal = Journal(self.folder)
            self._renaming = Renaming(self.out, self.folder)
            self._recover()
            self._refuse_other_work()
        except BaseException:  # nothing here is ours
            self._release()
            raise
        try:
            if not self.is_done:
                self._begin()
        except BaseException:
            self._undo()
            raise
        return self

    def _recover(self) -> None:
        """Finish or undo the renames at which another run was stopped."""
        commit = self._journal.commit
        if commit is not None and self._renaming.is_over(commit):
            _empty(self.folder, keep=(JOURNAL, SOLVED))
            self.is_done = self._key is not None and self._journal.key == self._key
        elif commit is not None:
            self._renaming.undo(commit)
            self._journal.note_undone()
        if not (self.is_done or self._force or was_interrupted(self.out)):
            _require_empty(self.out)

    def _refuse_other_work(self) -> None:
        unlike = self._journal.key not in (None, self._key) and self._journal.tensors and not self._journal.commit
        if (unlike or self._others_solved()) and not self._force:
            raise RequestError(
                f"While preparing to write {self.out}: an interrupted run has left finished work of another kind there "
                f"({self.folder}). Run that command again to continue it, name another folder, or set force to "
                "throw it away.",
                keys=("force",),
            )

    def _others_solved(self) -> list[Path]:
        return [
            path
            for path in (self.folder / SOLVED).glob("*")
            if self._solved is None or not path.name.startswith(self._solved[:16])
        ]

    def _begin(self) -> None:
        for path in self._others_solved():
            path.unlink()
        if self._key is not None and self._journal.exists and self._journal.key == self._key:
            self._journal.go_on()
            return
        _empty(self.folder, keep=(SOLVED,), strict=True)  # of a write that was killed
        self._journal.begin(self._key)

    def create(self, name: str) -> IO[bytes]:
        """Open a file of the output for writing (and reading back), under its temporary name."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stage(name)
        file = path.open("w+b")
        restrict(path, self._closed)
        return file

    def reopen(self, name: str, size: int) -> IO[bytes] | None:
        """The file that an interrupted run staged under this name, if it has its size."""
        path = self.folder / name
        if not path.is_file() or path.is_symlink() or path.stat().st_size != size:
            return None
        self._stage(name)
        return path.open("r+b")

    def _stage(self, name: str) -> None:
        if name not in self._staged:
            self._staged.append(name)

    def finished(self) -> list[JournalLine]:
        """The tensors that an interrupted run noted."""
        return self._journal.tensors if self._key is not None else []

    def committed(self) -> list[str]:
        """The files of a model that was complete before."""
        return self._journal.commit.files if self._journal.commit else []

    def note(self, **entry: Any) -> None:
        """Add a finished tensor to the journal."""
        if self._key is not None:
            self._journal.note(**entry)

    def commit(self, last: str) -> None:
        """Rename everything to its place in the order it was staged, `last` at the very end; or nothing at all."""
        commit = self._renaming.plan([*(name for name in self._staged if name != last), last])
        sync_folders(self.folder, commit.files)
        if self._created:
            system.sync_folder(self._created[0].parent)
        self._is_unsettled = True
        try:
            self._journal.note_commit(commit)
            self._renaming.run(commit)
        except BaseException:
            self._take_back()
            raise
        self._is_committed, self._is_unsettled = True, False

    def _take_back(self) -> None:
        """The older model again, if there was one, and the staged files where they were."""
        commit = Journal(self.folder).commit
        try:
            if commit is not None:
                self._renaming.undo(commit)
                self._journal.note_undone()
        except OSError as error:
            raise CheckpointError(
                f"While replacing the model in {self.out}: {error.strerror or error}, twice. Its files are safe in "
                f"{self.folder}; once the disk works, run the same command again, which puts them in order first."
            ) from error
        self._is_unsettled = False

    def _make_folders(self) -> None:
        missing = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self._created.append(folder)
            restrict(folder, self._closed)
        if self.folder not in self._created:  # of an earlier run, or of what was solved before this one
            restrict(self.folder, self._closed)
            if [path.name for path in self.out.iterdir()] == [STAGING]:
                restrict(self.out, self._closed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt) and self._key is not None
        if kind is None and (self._is_committed or self.is_done):
            _empty(self.folder, keep=(JOURNAL, SOLVED))
            if self._finish:
                finish_output(self.out)
            self._release()
        elif self._is_committed or self.is_done or self._is_unsettled or interrupted:
            self._release()
        else:
            self._undo()

    def _undo(self) -> None:
        if self._lock is not None:  # without the lock, the files there belong to another writer
            shutil.rmtree(self.folder, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        for folder in reversed(self._created):
            with contextlib.suppress(OSError):  # gone already, or there is something in it
                folder.rmdir()


def _empty(folder: Path, *, keep: tuple[str, ...], strict: bool = False) -> None:
    """Remove what is in a folder; unless `strict`, as far as the system lets us."""
    with contextlib.nullcontext() if strict else contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name not in keep:
                is_folder = path.is_dir() and not path.is_symlink()
                shutil.rmtree(path, ignore_errors=not strict) if is_folder else path.unlink()


def _refuse_occupied(out: Path, force: bool) -> None:
    if is_url(out):
        raise RequestError(
            f"While preparing to write {usable_url(out, 'preparing to write')}: models are written to addresses by "
            "merge and by the alignment of two models alone. Name a folder."
        )
    if out.exists() and not out.is_dir():
        raise RequestError(f"While preparing to write {out}: it is a file and not a folder. Name a new folder.")
    above = next((path for path in out.absolute().parents if path.exists()), None)
    if above is not None and not above.is_dir():
        raise RequestError(f"While preparing to write {out}: {above.name} above it is a file. Name another folder.")
    if not (force or not out.exists() or was_interrupted(out) or is_unfinished(out)):
        _require_empty(out)


def _require_empty(out: Path) -> None:
    if any(path.name != STAGING for path in out.iterdir()):
        raise RequestError(
            f"While preparing to write {out}: the folder is not empty, and nothing is overwritten unasked. "
            "Name a new folder, or set force to replace the model in it.",
            keys=("force",),
        )


def _lock_folder(folder: Path) -> int:
    """Two writers in one folder would mix their files; the lock goes away with the process, however it ends."""
    try:
        return system.lock_folder(folder)
    except BlockingIOError as error:
        raise CheckpointError(
            f"While preparing to write {folder.parent}: another process is writing into this folder. "
            "Wait until it has finished, or name another folder."
        ) from error


def check_space(out: Path, needed: int) -> None:
    """Raise when the disk that will hold `out` has not enough room, before anything is written."""
    free = _free(out)
    if free < needed:
        raise _full(out, needed, free)


def disk_failure(out: Path, needed: int, error: OSError) -> CheckpointError:
    """What to tell the user about an OSError met while writing `out`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(out, needed, _free(out))
    where = f" ({error.filename})" if error.filename else ""
    return CheckpointError(
        f"While writing {out}: {error.strerror or error}{where}. Nothing was left behind. "
        "Check that the folder can be written to, or name another, then run again."
    )


def refuse_overwrite(out: str | os.PathLike[str], inputs: Iterable[Checkpoint | str | os.PathLike[str]]) -> None:
    """Raise when writing `out` would change an input: the same folder by any name, or a folder inside it."""
    if is_url(out):
        _refuse_input_url(usable_url(out, "preparing to write"), inputs)
        return
    target = Path(out).expanduser().resolve()
    for source in inputs:
        folder = source.folder if isinstance(source, Checkpoint) else Path(source).expanduser()
        if folder is None or not folder.exists():
            continue  # in memory, or on the hub
        resolved = folder.resolve() if folder.is_dir() else folder.resolve().parent
        # A loose weight file in, say, the current folder does not make everything below that folder its own.
        name = source.name if isinstance(source, Checkpoint) else os.fspath(source)
        stored = source.parts()[0].name if isinstance(source, Checkpoint) else name
        loose = Path(stored).expanduser().is_file() and not (resolved / "config.json").exists()
        if target == resolved or (resolved in target.parents and not loose):
            where = "the folder" if target == resolved else "inside the folder"
            raise RequestError(
                f"While preparing to write {out}: it is {where} of the input {name}, and inputs are never modified. "
                "Name a folder elsewhere."
            )


def _refuse_input_url(target: str, inputs: Iterable[Checkpoint | str | os.PathLike[str]]) -> None:
    for source in inputs:
        name = source.name if isinstance(source, Checkpoint) else source
        if is_url(name) and f"{target}/".startswith(f"{usable_url(name, 'preparing to write')}/"):
            raise RequestError(
                f"While preparing to write {target}: it is the input {name} or inside it, and inputs are never "
                "modified. Name an address elsewhere."
            )


def _full(out: Path, needed: int, free: int) -> CheckpointError:
    return CheckpointError(
        f"While writing {out}: the disk is full or too small. The output needs {needed:,} bytes "
        f"({needed / 1e9:.1f} GB) and {free:,} bytes ({free / 1e9:.1f} GB) are free; nothing was left behind. "
        "Make room, name a folder on another disk, or ask for a narrower dtype such as bfloat16."
    )


def _free(out: Path) -> int:
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
