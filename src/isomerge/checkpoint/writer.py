"""Write a checkpoint: the plan gives every header in advance, so tensors can come in any order and in pieces."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from isomerge import system
from isomerge.checkpoint.base import Checkpoint, Progress, TensorInfo
from isomerge.checkpoint.direct import DirectFile
from isomerge.checkpoint.dtypes import CastReport, parse_size
from isomerge.checkpoint.hashing import TENSOR_HASH, TENSOR_HASHES, raw_bytes, tensors_digest
from isomerge.checkpoint.journal import JournalLine
from isomerge.checkpoint.permissions import closed_by
from isomerge.checkpoint.shards import Shard, TensorStream, index_texts, split_shards
from isomerge.checkpoint.staged_tensors import CHUNK, StagedTensors, WriteBytes, write_all, write_tensor
from isomerge.checkpoint.staging import Staging, check_space, disk_failure, finish_output
from isomerge.errors import RequestError
from isomerge.results import Result


@dataclass
class Written(Result):
    """What is now on disk. `bytes` counts the weight files; `sha256` is of the lines "name  BLAKE3 of its bytes" of all
    tensors, sorted, and so the same however the model is cut into files; None where nothing was hashed."""

    out: Path
    files: tuple[Path, ...]
    tensors: int
    bytes: int
    sha256: str | None
    url: str | None = None
    """The address it was uploaded to: then no folder is left here, and `out` and `files` are parts of the address."""

    def __fspath__(self) -> str:
        """The folder or address: what was written can be named wherever a path can."""
        return self.url or os.fspath(self.out)

    def finish(self) -> None:
        """End a write that was made with finish=False: from here on the same call finds a model in its way."""
        if self.url is not None:
            return  # an upload ends by itself
        for folder in sorted({self.out, *(path.parent for path in self.files)}):
            finish_output(folder)


class CheckpointWriter:
    """A folder in the making. Any thread may write any piece of any tensor; `commit` makes it a model.

    After an exception nothing new looks finished and nothing is left, except that a KeyboardInterrupt, like a kill,
    keeps the finished tensors for a later writer with the same `key`.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        plan: Mapping[str, TensorInfo],
        *,
        config: Mapping[str, Any] | None = None,
        donor: Checkpoint | None = None,
        copies: Mapping[str, Path] | None = None,
        shard_size: int | str = "5GB",
        force: bool = False,
        key: str | None = None,
        solved: str | None = None,
        finish: bool = True,
        inputs: Iterable[Checkpoint] = (),
        hashed: bool = True,
    ) -> None:
        """`config` holds what changes in the donor's config.json; `copies`: the side files, by default the donor's;
        `key`, `solved` and `finish` as for `Staging`; who may not read one of the `inputs` may not read the output.
        Unless `hashed` is False, nothing is taken over from an interrupted run without the hash of what it was.
        """
        self.out = Path(out).expanduser()
        if not plan:
            raise RequestError(
                f"While preparing to write {self.out}: the plan holds no tensor. Check the models and filters."
            )
        self.plan, self._hashed, self._key = plan, hashed, key
        self._shards = split_shards(plan, parse_size(shard_size), donor.stems if donor else None)
        self._layout = {name: Shard(tensors, name.rpartition("/")[0]) for name, tensors in self._shards.items()}
        self._file_of = {tensor: name for name, tensors in self._shards.items() for tensor in tensors}
        self._copies = dict(side_copies(donor) if copies is None else copies)
        self._texts = index_texts(self._shards)
        self._description = donor.description if donor else "config.json"
        self._config = config_text(config, donor)
        self.bytes = sum(shard.nbytes for shard in self._layout.values())
        self._needed = (
            self.bytes
            + sum(path.stat().st_size for path in self._copies.values())
            + sum(map(len, self._texts.values()))
            + len(self._config or b"")
        )
        closed = closed_by([*inputs, *([donor] if donor else [])], self._copies.values())
        self._staging = Staging(self.out, force=force, key=key, solved=solved, finish=finish, closed=closed)
        self._files: dict[str, IO[bytes]] = {}
        self._direct: dict[str, DirectFile] = {}
        self._hashes: dict[str, str | None] = {}
        self.lost: dict[str, CastReport] = {}
        """What each finished tensor lost when it was rounded."""
        self._copied: dict[str, str] = {}
        self._noting = threading.Lock()
        self.written: Written | None = None
        """Known once this is committed; at first, if the same writer has committed before and was stopped later."""

    def __enter__(self) -> CheckpointWriter:
        with self._blaming_the_disk():
            self._staging.__enter__()
        try:
            if self._staging.is_done:
                self._take_over()
                return self
            with self._blaming_the_disk():
                whole = self._open_files()
                self._keep_finished(whole)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _take_over(self) -> None:
        """Know of a model that is complete what its writer knew."""
        for name, shard in self._layout.items():
            path = self.out / name
            if not path.is_file() or path.stat().st_size != shard.nbytes:
                raise RequestError(
                    f"While preparing to write {self.out}: {name} was changed after the run that wrote it was stopped. "
                    "Name a new folder, or set force to replace the model in it.",
                    keys=("force",),
                )
        for entry in self._staging.finished():
            if entry.tensor in self.plan:
                self._know(entry)
        self.written = self._result(self._staging.committed())

    def _open_files(self) -> set[str]:
        """Open every weight file; the names of those that an interrupted run left whole."""
        kept = set()
        for name, shard in self._layout.items():
            file = self._staging.reopen(name, shard.nbytes)
            if file is not None:
                kept.add(name)
            self._files[name] = file if file is not None else self._staging.create(name)
            self._direct[name] = DirectFile(self._staging.folder / name)
        # What is kept needs no new room.
        check_space(self.out, self._needed - sum(self._layout[name].nbytes for name in kept))
        for name, shard in self._layout.items():
            if name not in kept:
                system.reserve(self._files[name], shard.nbytes)
            # Of a kept file too: its tensors are checked by their hashes, and nothing else vouches for its header.
            self._write_at(name, shard.header, 0)
        return kept

    def _keep_finished(self, kept: set[str]) -> None:
        for entry in self._staging.finished():
            name = str(entry.tensor)
            if name not in self.plan or self._file_of[name] not in kept:
                continue
            if not self._hashed if entry.hash is None else self._hash_staged(name) == entry.hash:
                self._know(entry)

    def _know(self, entry: JournalLine) -> None:
        name = str(entry.tensor)
        self._hashes[name] = entry.hash
        self.lost[name] = CastReport(math.prod(self.plan[name].shape), entry.overflow, entry.vanished)

    @property
    def finished(self) -> Mapping[str, str | None]:
        """The tensors that are whole on disk, with their hashes; at first those of an interrupted run."""
        return self._hashes

    def write(self, name: str, offset: int, piece: torch.Tensor) -> None:
        """Put a piece of a tensor at its place, `offset` counted in bytes from the tensor's own start."""
        self.write_bytes(name, offset, raw_bytes(piece))

    def write_bytes(self, name: str, offset: int, view: memoryview) -> None:
        file = self._file_of[name]
        start = self._layout[file].starts[name] + offset
        with self._blaming_the_disk():
            self._write_at(file, view, start)

    def _write_at(self, file: str, data: memoryview | bytes, start: int) -> None:
        descriptor, view = self._files[file].fileno(), memoryview(data)
        begin, end = self._direct[file].write(view, start)
        write_all(descriptor, view[:begin], start)
        write_all(descriptor, view[end:], start + end)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[WriteBytes]:
        """A tensor to be written in pieces."""
        yield lambda offset, view: self.write_bytes(name, offset, view)

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it is what writes rows; headers, the journal and the commit are this one's."""
        places = {tensor: (file, self._layout[file].starts[tensor]) for tensor, file in self._file_of.items()}
        return StagedTensors, (self.folder.absolute(), self._key, places)

    @property
    def folder(self) -> Path:
        """Where the files are staged."""
        return self._staging.folder

    def write_whole(
        self,
        name: str,
        tensor: torch.Tensor,
        lost: CastReport | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Write and finish a tensor."""
        self.finish(name, write_tensor(self, name, tensor, progress), lost)

    def finish(self, name: str, digest: str | None, lost: CastReport | None = None) -> None:
        """Note that a tensor is whole, and what it lost in the written dtype."""
        lost = lost or CastReport()
        with self._noting, self._blaming_the_disk():
            self._start_writing(name)
            self._staging.note(tensor=name, hash=digest, vanished=lost.underflow, overflow=lost.overflow)
            self._hashes[name] = digest
            self.lost[name] = lost

    def _start_writing(self, name: str) -> None:
        """Ask the system to bring a finished tensor to the disk now, so that little is left to wait for at the end."""
        file = self._file_of[name]
        system.start_writing(self._files[file].fileno(), self._layout[file].starts[name], self.plan[name].nbytes)

    def file_of(self, name: str) -> str:
        """The weight file that holds a tensor."""
        return self._file_of[name]

    def sha256(self) -> str | None:
        """Of all tensors together; None while one is missing or was not hashed."""
        known = {name: digest for name, digest in self._hashes.items() if digest is not None}
        return tensors_digest(known) if len(known) == len(self.plan) else None

    def side_hashes(self) -> dict[str, str]:
        """The sha256 of everything that is written beside the weights, as far as it is known now."""
        with self._blaming_the_disk():
            self._stage_copies()
        return self._copied | {name: hashlib.sha256(text).hexdigest() for name, text in self._all_texts().items()}

    def add(self, name: str, content: bytes) -> None:
        """One more side file, in the place of a copied one of the same name."""
        self._copies.pop(name, None)
        self._copied.pop(name, None)
        self._texts = {name: content, **{k: v for k, v in self._texts.items() if k != name}}

    def stage(self) -> Path:
        """Bring all files to the disk, in the folder that this returns: a whole model, but for its place."""
        unfinished = sorted(set(self.plan) - set(self._hashes))
        if unfinished:
            raise RuntimeError(f"{len(unfinished)} tensors were not written, {unfinished[0]} the first of them")
        with self._blaming_the_disk():
            for file in self._files.values():
                if not file.closed:
                    system.sync(file)
                    file.close()
            self._stage_copies()
            for name, text in self._all_texts().items():
                with self._staging.create(name) as file:
                    file.write(text)
                    system.sync(file)
        return self._staging.folder

    def commit(self) -> Written:
        """Rename everything to its place once it is on the disk, config.json last: without it nothing loads."""
        self.stage()
        texts = self._all_texts()
        with self._blaming_the_disk():
            self._staging.commit(last=list(texts or self._layout)[-1])
        self.written = self._result([*self._layout, *self._copied, *texts])
        return self.written

    def _stage_copies(self) -> None:
        """What is hashed is what was copied, whatever becomes of the original."""
        for name, path in self._copies.items():
            if name in self._copied:
                continue
            digest = hashlib.sha256()
            with path.open("rb") as source, self._staging.create(name) as file:
                while piece := source.read(CHUNK):
                    file.write(piece)
                    digest.update(piece)
                system.sync(file)
            self._copied[name] = digest.hexdigest()

    def _all_texts(self) -> dict[str, bytes]:
        return self._texts if self._config is None else {**self._texts, self._description: self._config}

    def _result(self, files: Iterable[str]) -> Written:
        return Written(self.out, tuple(self.out / name for name in files), len(self.plan), self.bytes, self.sha256())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        for direct in self._direct.values():
            direct.close()
        self._staging.__exit__(kind, error, trace)

    def _hash_staged(self, name: str) -> str:
        """A tensor's hash as it lies in the staged file: what a power cut took is written again."""
        file = self._file_of[name]
        start, left = self._layout[file].starts[name], self.plan[name].nbytes
        digest, buffer = TENSOR_HASHES[TENSOR_HASH](), memoryview(bytearray(min(left, CHUNK)))
        while left:
            count = system.read_at(self._files[file].fileno(), buffer[: min(left, CHUNK)], start)
            digest.update(buffer[:count])
            start, left = start + count, left - count
        return str(digest.hexdigest())

    @contextlib.contextmanager
    def _blaming_the_disk(self) -> Any:
        try:
            yield
        except OSError as error:
            raise disk_failure(self.out, self._needed, error) from error


def write_checkpoint(
    out: str | os.PathLike[str],
    plan: Mapping[str, TensorInfo],
    produce: Iterable[tuple[str, torch.Tensor]],
    *,
    config: Mapping[str, Any] | None = None,
    donor: Checkpoint | None = None,
    shard_size: int | str = "5GB",
    force: bool = False,
    progress: Callable[[int], None] | None = None,
    inputs: Iterable[Checkpoint] = (),
) -> Written:
    """Write the tensors that `produce` yields, in the plan's order, as a folder that loads in the stock library.

    `config` holds what changes in the donor's config.json (all of it when there is no donor); the donor's side files
    are copied. `progress` is told the bytes of each piece written. After any failure nothing new looks finished.
    """
    stream = TensorStream(produce, Path(out).expanduser())
    writer = CheckpointWriter(out, plan, config=config, donor=donor, shard_size=shard_size, force=force, inputs=inputs)
    with writer:
        for name, info in plan.items():
            writer.write_whole(name, stream.take(name, info), progress=progress)
        stream.end()
        return writer.commit()


def config_text(changes: Mapping[str, Any] | None, donor: Checkpoint | None) -> bytes | None:
    """The donor's config.json with the changes made: its own bytes when nothing changes, its key order otherwise."""
    before = donor.config if donor else {}
    after = {**before, **(changes or {})}
    if not after:
        return None
    original = donor.folder / donor.description if donor and donor.folder else None
    if original and original.is_file() and json.loads(original.read_bytes()) == after:
        return original.read_bytes()
    return (json.dumps(after, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def side_copies(donor: Checkpoint | None) -> dict[str, Path]:
    """The donor's side files by the name each will have in the output."""
    if donor is None or donor.folder is None:
        return {}
    folder = donor.folder
    return {path.relative_to(folder).as_posix(): path for path in donor.side_files()}


def counted(progress: Progress | None, plan: Mapping[str, TensorInfo], what: str) -> Callable[[int], None]:
    """Turns the writer's pieces into `progress(done, total, what)`."""
    total, done = sum(info.nbytes for info in plan.values()), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total, what)

    return advance
