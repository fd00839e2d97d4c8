"""In 16 bits, as people merge: isomerge is nearer to the exact result, and where the two choose apart is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.rounding import DTYPES, PLAIN, agreement

pytestmark = pytest.mark.peers
CUTS = ("ties", "breadcrumbs", "breadcrumbs_ties")
"""Methods that keep the largest changes: of changes of one magnitude at the cut, mergekit keeps those sorted first."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", PLAIN)
def test_sixteen_bits_agree_with_mergekit(mergekit: Any, family: Any, tmp_path: Path, method: str, dtype: str) -> None:
    found = agreement(mergekit, family("llama", DTYPES[dtype]), method, DTYPES[dtype], tmp_path)
    assert found.ours_apart <= (0.01 if method in CUTS else 2e-4)
    assert found.ours <= found.theirs + 0.01
    # Half a last place at most: a third of that, or less, in the mean.
    assert found.ours <= 0.25
