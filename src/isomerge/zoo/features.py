"""Features of examples that depend on no model, so that descriptions of any two models can be compared.

They are part of the format of descriptions: a map never changes, and another one gets another name. Neither needs a
table of random numbers: signs and places come from hashes.

- `image-1`: 8 × 8 pixels in red, green and blue from 0 to 1, projected to 32 numbers by random signs; the squared
  distance of two pictures is in the mean that of their pixels.
- `text-1`: words and pairs of neighbouring words in lower case, hashed with a sign to 256 places, the square root of
  each count, length 1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from isomerge.data.base import Data, Wanted

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class FeatureMap:
    """How examples become numbers, and the width of the kernel between them."""

    name: str
    width: int
    variance: float
    """σ² of k(x, y) = exp(−‖x − y‖² / 2σ²), the same for all models."""
    of: Callable[[Iterable[object]], np.ndarray]


def features_of(
    data: Data, limit: int | None, seed: int, *, default: int
) -> tuple[FeatureMap, np.ndarray, list[str | None]]:
    """The map that fits the data, the features (examples, width), and the class of each example. `default` is the
    number of examples where nobody asks for another."""
    limit = Wanted(limit=data.limit if limit is None else limit).limit or default
    contents = list(data.contents(limit, seed))
    chosen = MAPS["image-1" if data.kind == "images" else "text-1"]
    return chosen, chosen.of(one.value for one in contents), [one.label for one in contents]


def _of_images(images: Iterable[object]) -> np.ndarray:
    flat = np.stack([np.asarray(image, np.float64).reshape(-1) / 255 for image in images])
    projected: np.ndarray = flat @ _signs(flat.shape[1], 32) / np.sqrt(flat.shape[1] * 32)
    return projected


def _of_texts(texts: Iterable[object]) -> np.ndarray:
    rows = [_of_text(str(text)) for text in texts]
    return np.stack(rows)


def _of_text(text: str) -> np.ndarray:
    """
    >>> one, same, other = (_of_text(text) for text in ("The cat sat.", "the cat  sat .", "A dog ran"))
    >>> bool((one == same).all()), bool(one @ other < 0.5)
    (True, True)
    """
    words = _WORD.findall(text.casefold())
    row = np.zeros(256)
    for word in (*words, *(f"{a} {b}" for a, b in pairwise(words))):
        place, sign = _place(word)
        row[place] += sign
    row = np.sign(row) * np.sqrt(np.abs(row))
    length = float(np.linalg.norm(row))
    return row / length if length else row


@cache
def _place(word: str) -> tuple[int, int]:
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=2, person=b"isomerge text-1").digest()
    return digest[0], 1 if digest[1] & 1 else -1


@cache
def _signs(rows: int, columns: int) -> np.ndarray:
    bits = hashlib.shake_256(b"isomerge image-1").digest(-(-rows * columns // 8))
    signs: np.ndarray = 2.0 * np.unpackbits(np.frombuffer(bits, np.uint8))[: rows * columns] - 1
    return signs.reshape(rows, columns)


MAPS = {
    one.name: one for one in (FeatureMap("image-1", 32, 0.05, _of_images), FeatureMap("text-1", 256, 0.5, _of_texts))
}
