r"""Names and texts from other people's files, made harmless to show.

A model, a tensor or a recipe can be called anything, also something that moves a terminal's cursor, reverses the order
of reading or is a link in a model card.

>>> print(visible("a\x1b[2Jb"), inert("<b>[x](y)"))
a\x1b[2Jb \<b\>\[x\]\(y\)
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

# Cc: terminal controls; Cf: marks that change the direction of reading or show nothing; Cs: halves of characters, as in
# file names that are not UTF-8; Zl, Zp: other ends of lines.
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
SECRETS = re.compile(r"(\b[A-Za-z][\w.+-]+:/{1,2})(?:[^\s/?#'\"<>]*@)?([^\s?#'\"<>]*)(?:[?#][^\s'\"<>]*)?")
"""An address: its scheme, perhaps who asks, the place, perhaps a query."""
MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#|~&!$:@]|(?<=www)\.)")


def visible(text: str, keep: str = "\n\t") -> str:
    r"""The text with every character that controls instead of showing replaced by its escape; `keep` stays.

    >>> print(visible("two\nlines, one \u202ereversed", keep=""))
    two\nlines, one \u202ereversed
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(one) if _is_hidden(one) and one not in keep else one for one in text)


def without_secrets(text: str) -> str:
    """The text without what may be secret in the addresses in it: names, passwords, queries and signatures.

    >>> without_secrets("GET https://me:key@host/a.json?X-Amz-Signature=1f failed; see s3://bucket/a")
    'GET https://host/a.json failed; see s3://bucket/a'
    """
    return SECRETS.sub(r"\1\2", text)


def inert(text: str) -> str:
    """Text for one line of a Markdown page, where it is no markup, no HTML and no link."""
    return MARKDOWN.sub(r"\\\1", visible(" ".join(text.split()), keep=""))


def code(text: str) -> str:
    """The same in letters of one width, as names of files and tensors are shown."""
    return f"`{visible(text, keep='').replace('`', chr(39))}`"


def short_names(models: Sequence[str]) -> list[str]:
    """The last parts of paths and hub ids, where they tell the models apart.

    >>> short_names(["runs/a", "runs/b"]), short_names(["a/model", "b/model"])
    (['a', 'b'], ['a/model', 'b/model'])
    """
    short = [PurePath(model).name or model for model in models]
    return short if len(set(short)) == len(models) else list(models)


def as_flags(note: str) -> str:
    """The notes of the library name arguments, in backticks: on the command line they are flags.

    >>> as_flags("write it with `anchor_out`")
    'write it with --anchor-out'
    """
    return re.sub("`([a-z_]+)`", lambda name: "--" + name[1].replace("_", "-"), note)


def all_visible(value: Any) -> Any:
    """The same for every text in a record, keys too."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {all_visible(key): all_visible(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(all_visible, value))
    return value


def _is_hidden(one: str) -> bool:
    # Joiners make one emoji or one syllable of several characters.
    return unicodedata.category(one) in HIDDEN and one not in "\u200c\u200d"


def _escaped(one: str) -> str:
    return one.encode("unicode_escape", "surrogatepass").decode("ascii")
