"""A weight file of a store: which bytes are fetched, and what is kept of them for the next read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from isomerge.checkpoint.files import SpannedFile
from isomerge.checkpoint.header import HeaderError, header_metadata, header_text, sized_header
from isomerge.checkpoint.remote_store import RemoteFolder, RemoteStamp
from isomerge.errors import CheckpointError

SMALL = 256 << 10
"""Bytes below which a tensor is fetched together with its small neighbours."""
RUN = 4 << 20
RUNS_KEPT = 8
AHEAD = 8 << 20
"""Bytes that each thread fetches at once of a tensor that it reads in blocks of rows."""


class RemoteFile(SpannedFile):
    """A safetensors file of a store. Its size and tag must stay those it was opened with."""

    def __init__(self, store: RemoteFolder, label: str, stamp: RemoteStamp) -> None:
        self.store, self.stamp = store, stamp
        try:
            super().__init__(label, sized_header(stamp.size, lambda start, stop: _bytes(store, label, start, stop)))
        except OSError as error:
            raise HeaderError(f"it cannot be read ({error})") from None
        self._runs = _runs_of_small(self._entries)
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._keeping = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict(), "_keeping": None, "_scratch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_keeping": threading.Lock(), "_scratch": threading.local()}

    def identity(self) -> Any:
        return None if self.stamp.tag is None else [self.store.url, self.stamp.size, self.stamp.tag]

    def metadata(self) -> dict[str, str]:
        return header_metadata(
            header_text(self.stamp.size, lambda start, stop: _bytes(self.store, self.label, start, stop))
        )

    def _fill(self, name: str, start: int, buffer: torch.Tensor) -> None:
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        try:
            if name in self._runs:
                begin, end = self._runs[name]
                view[:] = self._run(begin, end)[start - begin : start - begin + len(view)]
            else:
                self._fill_ahead(name, start, view)
        except OSError as error:
            raise self._unread(name, error) from None

    def read_spans(self, name: str, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        """In requests that are made together."""
        if name in self._runs:
            return super().read_spans(name, places)
        entry = self._entries[name]
        width = entry.info.dtype.itemsize
        buffer = torch.empty(sum(stop - start for start, stop in places) * width, dtype=torch.uint8)
        views, done = [], 0
        for start, stop in places:
            count = (stop - start) * width
            views.append((entry.start + start * width, memoryview(buffer[done : done + count].numpy())))  # type: ignore[arg-type]
            done += count
        try:
            self.store.read(self.label, views)
        except OSError as error:
            raise self._unread(name, error) from None
        return buffer.view(entry.info.dtype)

    def _unread(self, name: str, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"While reading tensor '{name}' from {self.store.address(self.label)}: {error}. Check the network and that "
            "nobody writes the file, then run again."
        )

    def _fill_ahead(self, name: str, start: int, view: memoryview) -> None:
        """A block of rows from its tensor's beginning, or next to the last one, comes with those after it. A sample,
        which begins anywhere or is small, comes alone."""
        entry, mine = self._entries[name], self._scratch
        begin, content = getattr(mine, "ahead", (0, b""))
        stop = start + len(view)
        if begin <= start and stop <= begin + len(content):
            view[:] = content[start - begin : stop - begin]
        elif len(view) >= SMALL and start in (entry.start, begin + len(content)):
            mine.ahead = (0, b"")  # before the next one takes its place in memory
            end = max(stop, min(start + AHEAD, entry.start + entry.info.nbytes))
            content = memoryview(bytearray(end - start))
            self.store.read(self.label, [(start, content)])
            mine.ahead = start, content
            view[:] = content[: len(view)]
        else:
            self.store.read(self.label, [(start, view)])

    def _run(self, begin: int, end: int) -> bytes:
        with self._keeping:
            if begin not in self._kept:
                self._kept[begin] = _bytes(self.store, self.label, begin, end)
                while len(self._kept) > RUNS_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(begin)
            return self._kept[begin]


def _bytes(store: RemoteFolder, name: str, start: int, stop: int) -> bytes:
    content = bytearray(stop - start)
    store.read(name, [(start, memoryview(content))])
    return bytes(content)


def _runs_of_small(entries: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Where small tensors lie side by side: from where to where they are fetched in one request."""
    runs: list[tuple[int, int, list[str]]] = []
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        size = entry.info.nbytes
        if size > SMALL:
            continue
        if runs and runs[-1][1] == entry.start and entry.start + size - runs[-1][0] <= RUN:
            begin, _, names = runs.pop()
        else:
            begin, names = entry.start, []
        runs.append((begin, entry.start + size, [*names, name]))
    return {name: (begin, end) for begin, end, names in runs for name in names if len(names) > 1}
