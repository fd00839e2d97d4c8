"""One base class, one child per stage of the path of the data.

Every message is one paragraph: what was being done, to which file and tensor, the cause, the next step. Messages are
for people; code decides by the class of an error and by its attributes.

>>> error = RequestError("Reading 'x.yml': 'weigth' is no key.", keys=("weigth",))
>>> error.keys, str(error)
(('weigth',), "Reading 'x.yml': 'weigth' is no key.")
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from isomerge.text import visible


class IsomergeError(Exception):
    """Base of everything isomerge raises on purpose. `exit_code` is what the command line ends with.

    `keys` are the arguments, recipe keys or options that the error is about; `cause` is the message without what was
    being done; `module` is a package that is missing. All can be pickled.
    """

    exit_code = 1

    def __init__(
        self,
        *args: object,
        keys: Sequence[str] = (),
        cause: str | None = None,
        module: str | None = None,
    ) -> None:
        # Names in it come from files and may hold what controls a terminal.
        super().__init__(*(visible(one) if isinstance(one, str) else one for one in args))
        self.keys, self.cause, self.module = tuple(keys), cause, module


def ran_out_of_memory(error: BaseException) -> bool:
    """Also where torch could not get any, which on a CPU it says in words only."""
    words = ("can't allocate memory", "not enough memory")
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and any(one in str(error) for one in words))


class RequestError(IsomergeError):
    """The request itself was wrong: an unknown option value, models that do not fit together.

    `missing` has the keys of a recipe that would have to be there, such as "data" or "base_model".
    """

    exit_code = 2
    missing: frozenset[str] = frozenset()


class CheckpointError(IsomergeError):
    """A checkpoint could not be opened, read or written."""


class NotFoundError(CheckpointError, RequestError):
    """There is no checkpoint where the request says: it cannot be opened, and the request was wrong."""


class SpecificationError(IsomergeError):
    """An architecture's specification and the tensors of a checkpoint do not fit together."""


class AlignmentError(IsomergeError):
    """The alignment could not be solved or applied."""


def nearest(given: object, known: Iterable[str]) -> str | None:
    """The known value that is spelled most like the given one, whatever its case, if any is near."""
    given, known = str(given), list(known)
    folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(given, known, n=1)
    near = near or [folded[name] for name in difflib.get_close_matches(given.casefold(), folded, n=1)]
    return near[0] if near else None


def near_miss(given: object, known: Iterable[str]) -> str:
    """`did_you_mean` without the full list, which for tensor names would be hundreds long: nothing if none is near."""
    near = nearest(given, known)
    return f"Did you mean '{near}'?" if near else ""


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """A closing sentence that names the nearest known value, or all of them.

    >>> did_you_mean("ROTATOIN", ["permutation", "rotation", "full"])
    "Did you mean 'rotation'?"
    """
    known = list(known)
    return near_miss(given, known) or "Known values: " + ", ".join(known) + "."
