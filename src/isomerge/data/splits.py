"""Training, validation and test parts of a data set, by the names people give them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from isomerge.errors import RequestError, did_you_mean

_SPELLINGS = {
    "train": "train", "training": "train", "trn": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation", "devel": "validation",
    "test": "test", "testing": "test", "tst": "test", "eval": "test",
}  # fmt: skip


def same_split(name: str) -> str:
    """One spelling for each part: 'val', 'dev' and 'valid' are 'validation'; another name stays as it is.

    >>> same_split("Dev")
    'validation'
    """
    return _SPELLINGS.get(name.casefold(), name)


def split_in(path: str) -> str | None:
    """The part that a folder of the path names, if one does.

    >>> split_in("cifar/test/cat/1.jpg"), split_in("cat/test.jpg")
    ('test', None)
    """
    folders = path.split("/")[:-1]
    return next((_SPELLINGS[part.casefold()] for part in folders if part.casefold() in _SPELLINGS), None)


def split_of_file(name: str) -> str | None:
    """The part that a file's own name names: 'wiki.test.tokens', 'anger-gold.dev.txt', 'train_sent_emo.csv'.

    >>> split_of_file("wiki.valid.tokens"), split_of_file("isear.csv")
    ('validation', None)
    """
    words = re.split(r"[^A-Za-z]+", name.rsplit(".", 1)[0])
    return next((_SPELLINGS[word.casefold()] for word in words if word.casefold() in _SPELLINGS), None)


def pick_split(
    names: Iterable[str | None], wanted: str | None, prefer: str, source: str
) -> tuple[str | None, list[str]]:
    """The part to use, with a note where it was chosen and not named; None where there are no parts.

    Who prefers `test` measures a finished model. Everybody else learns or chooses something from the data, and comes to
    `test` last: it has to stay unseen.
    """
    parts = sorted({part for part in names if part is not None})
    if wanted is not None:
        wanted = same_split(wanted)
        if wanted not in parts:
            known = (
                f"It has {', '.join(parts)}. {did_you_mean(wanted, parts)}"
                if parts
                else "It has no parts; leave split out."
            )
            raise RequestError(f"While reading {source}: there is no part '{wanted}'. {known}", keys=("split",))
        return wanted, []
    if len(parts) < 2:
        return (parts[0] if parts else None), []
    order = (prefer, "validation", "train", *(part for part in parts if part != "test"), "test")
    chosen = next(part for part in order if part in parts)
    others = ", ".join(part for part in parts if part != chosen)
    return chosen, [f"using split '{chosen}' (also available: {others}; choose with `split`)"]
