"""The header of a GGUF file: the one place that knows the format's bytes.

Magic, version, two counts, the metadata (name, type, value), the tensors (name, axes, type, offset), then the data on
aligned places: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every length is held against the file's size
before anything is read, so a damaged file costs no more memory than it has bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from isomerge.checkpoint.base import TensorInfo
from isomerge.checkpoint.header import MOST_VALUES, Entry, HeaderError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LONGEST = 2**28
"""Bytes of a header: the largest vocabularies with their merges take some 20 million."""
MOST_STRINGS = 4_000_000
"""Of the whole header. Each costs memory of its own, however short it is."""
LONGEST_NAME = 1024
MOST_AXES = 4
STRING, ARRAY = 8, 9
NUMBERS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """What the header says of one tensor; `shape` as PyTorch has it, the last axis running fastest."""

    shape: tuple[int, ...]
    kind: int
    """ggml's number for how values are stored."""


@dataclass(frozen=True)
class GgufHeader:
    metadata: Mapping[str, Any]
    """Numbers, texts, arrays of numpy, lists of texts."""
    tensors: Mapping[str, GgufTensor]
    entries: Mapping[str, Entry]
    """Where each tensor lies, as rows of bytes: (rows, bytes of a row)."""


def read_gguf_header(path: Path, sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    """`sizes`: for each way to store values, how many of them a block holds and how many bytes it takes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        return _Reader(file, size, sizes).header()


class _Reader:
    def __init__(self, file: IO[bytes], size: int, sizes: Mapping[int, tuple[int, int]]) -> None:
        self._file, self._size, self._sizes, self._place, self._strings = file, size, sizes, 0, 0

    def header(self) -> GgufHeader:
        if self._size < 24 or (magic := self._take(4)) != MAGIC:
            raise HeaderError("it does not begin as a GGUF file does, so it is none or is damaged")
        version = self._number("<I")
        if version not in VERSIONS:
            raise HeaderError(
                f"it is of version {version:,} of GGUF (or written for a machine of the other byte order), and "
                f"{' and '.join(map(str, VERSIONS))} are known"
            )
        del magic
        tensors, entries = self._number("<Q"), self._number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(self._counted(entries, 13, "metadata entries")):
            key = self._name("a metadata entry")
            if key in metadata:
                raise HeaderError(f"its metadata has '{key}' twice")
            metadata[key] = self._value(self._number("<I"), key)
        listed = [self._tensor() for _ in range(self._counted(tensors, 32, "tensors"))]
        return self._laid_out(metadata, listed)

    # --- pieces -------------------------------------------------------------------------------------------------------
    def _take(self, count: int) -> bytes:
        if count > self._size - self._place:
            raise HeaderError(f"it is truncated inside the header ({self._size:,} bytes)")
        if count > LONGEST - self._place:
            raise HeaderError(f"its header is longer than {LONGEST:,} bytes, so it is damaged")
        self._place += count
        return self._file.read(count)

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _counted(self, count: int, least: int, what: str) -> int:
        """A count whose members take at least so many bytes each."""
        if count * least > self._size - self._place:
            raise HeaderError(f"its header counts {count:,} {what}, more than {self._size:,} bytes can hold")
        return count

    def _text(self) -> bytes:
        self._strings += 1
        if self._strings > MOST_STRINGS:
            raise HeaderError(f"its header holds more than {MOST_STRINGS:,} texts, so it is damaged")
        return self._take(self._number("<Q"))

    def _name(self, what: str) -> str:
        text = self._text()
        try:
            name = text.decode("utf-8")
        except UnicodeDecodeError:
            name = ""
        if not 0 < len(name) <= LONGEST_NAME:
            raise HeaderError(f"the name of {what} is not a text of 1 to {LONGEST_NAME} letters")
        return name

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._text().decode("utf-8", errors="replace")
        if kind == ARRAY:
            return self._array(key)
        return self._numbers(kind, 1, key)[0].item()

    def _array(self, key: str) -> Any:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == STRING:
            texts = range(self._counted(count, 8, f"texts in '{key}'"))
            return [self._text().decode("utf-8", errors="replace") for _ in texts]
        return self._numbers(kind, count, key)

    def _numbers(self, kind: int, count: int, key: str) -> Any:
        if kind not in NUMBERS:
            raise HeaderError(f"its metadata entry '{key}' is of the unknown type {kind}")
        dtype = np.dtype(NUMBERS[kind])
        self._counted(count, dtype.itemsize, f"numbers in '{key}'")
        found = self._take(count * dtype.itemsize)
        return np.frombuffer(found, dtype=np.uint8) != 0 if kind == 7 else np.frombuffer(found, dtype=dtype)

    def _tensor(self) -> tuple[str, GgufTensor, int]:
        name = self._name("a tensor")
        axes = self._number("<I")
        if not 1 <= axes <= MOST_AXES:
            raise HeaderError(f"tensor '{name}' has {axes:,} axes in its header, and 1 to {MOST_AXES} are possible")
        shape = tuple(self._number("<Q") for _ in range(axes))[::-1]
        if not all(shape) or math.prod(shape) > MOST_VALUES:
            raise HeaderError(f"tensor '{name}' has the shape {shape} in its header, which no memory can hold")
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in self._sizes:
            raise HeaderError(
                f"tensor '{name}' is stored in ggml's format {kind}, which the installed gguf package does not know",
                "Upgrade it (pip install --upgrade gguf), or download the file again.",
            )
        if shape[-1] % self._sizes[kind][0]:
            raise HeaderError(f"tensor '{name}' has rows of {shape[-1]:,} values, which its format cannot store")
        return name, GgufTensor(shape, kind), offset

    # --- the data -----------------------------------------------------------------------------------------------------
    def _laid_out(self, metadata: dict[str, Any], listed: list[tuple[str, GgufTensor, int]]) -> GgufHeader:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            raise HeaderError(f"its general.alignment is {str(alignment)[:40]}, and not a power of two")
        begin = -(-self._place // alignment) * alignment
        entries: dict[str, Entry] = {}
        end = 0
        for name, tensor, offset in sorted(listed, key=lambda item: item[2]):
            values, taken = self._sizes[tensor.kind]
            row = tensor.shape[-1] // values * taken
            raw = TensorInfo((math.prod(tensor.shape[:-1]), row), torch.uint8)
            if name in entries:
                raise HeaderError(f"its header has tensor '{name}' twice")
            if offset < end or offset % alignment:
                raise HeaderError(f"tensor '{name}' begins at byte {offset:,} of the data, inside another or unaligned")
            end = offset + raw.nbytes
            if begin + end > self._size:
                raise HeaderError(f"it is truncated: {self._size:,} bytes of the {begin + end:,} that its header needs")
            entries[name] = Entry(raw, begin + offset)
        return GgufHeader(metadata, {name: tensor for name, tensor, _ in listed}, entries)
