"""Regular expressions that come with files or requests, matched against names under a limit of time.

Python's own `re` cannot be stopped: `(a+)+$` takes it centuries on a name of fifty letters. The `regex` package reads
the same patterns and can; it writes counted repeats out, which are therefore few.
"""

from __future__ import annotations

import math
import re
import time
from typing import Any

import regex

from isomerge.errors import RequestError

SECONDS = 1.0
"""Of the processor, for all names together that a pattern is matched against."""
LONGEST = 10_000
"""Characters of a pattern."""
MOST_REPEATS = 1000
"""The product of all counts in braces."""
COUNTS = re.compile(r"\{(\d*)(?:,(\d*))?\}")


class NamePattern:
    """A pattern, and the time that is left for it.

    >>> NamePattern(r"(.*\\.)?(q_proj|v_proj)").fullmatch("layers.0.q_proj")
    True
    """

    def __init__(self, pattern: str) -> None:
        """Raises ValueError with what is wrong with the pattern."""
        if len(pattern) > LONGEST:
            raise ValueError(f"it is longer than {LONGEST:,} characters")
        counts = [max(int(n[:9] or 0) for n in found) for found in COUNTS.findall(pattern)]
        if math.prod(max(1, count) for count in counts) > MOST_REPEATS:
            raise ValueError(f"it counts to more than {MOST_REPEATS:,} repeats")
        try:
            re.compile(pattern)  # the dialect that people and PEFT write
            self._compiled: Any = regex.compile(pattern)
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error) or type(error).__name__) from error
        self.pattern, self._left = pattern, SECONDS

    def fullmatch(self, name: str) -> bool:
        return self._within_time(self._compiled.fullmatch, name)

    def search(self, name: str) -> bool:
        return self._within_time(self._compiled.search, name)

    def _within_time(self, match: Any, name: str) -> bool:
        start = time.process_time()
        try:
            return match(name, timeout=max(self._left, 1e-3)) is not None
        except TimeoutError as error:
            raise RequestError(
                f"While matching names with the pattern '{self.pattern[:100]}': it takes more than {SECONDS:g} s, as "
                "repeats inside repeats do. Write it without them."
            ) from error
        finally:
            self._left -= time.process_time() - start
