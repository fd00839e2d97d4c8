"""What the attack has found, read again: a value or an IsomergeError, and nothing that the safetensors library refuses.

Each finding is one damaged file in a folder that is otherwise good. `python -m fuzz` (make fuzz) finds more.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz import readers
from fuzz.worker import fill, outcome

STORED = sorted((Path(__file__).parent / "findings").glob("*.json"))
SLOW = {"record", "transform", "config", "merge", "statistics"}  # whose good folders take seconds to make


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    readers.SCRATCH[:] = [folder]
    yield folder
    readers.SCRATCH.clear()


@pytest.mark.parametrize(
    "stored", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in SLOW else []) for p in STORED]
)
def test_findings_stay_fixed(stored: Path, scratch: Path) -> None:
    reader = readers.READERS[stored.stem]
    (scratch / stored.stem).mkdir()
    seeds = reader.seeds(scratch / stored.stem)
    findings = json.loads(stored.read_text())
    wrong = []
    for finding in findings:
        content = zlib.decompress(base64.b64decode(finding["content"]))
        fill(scratch / "input", {**seeds[finding["beside"]], finding["file"]: content})
        what, why = outcome(reader, scratch / "input")
        if what not in ("accepted", "refused"):
            wrong.append((finding["found"], what, why))
    assert findings and not wrong


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if n in {*SLOW, "apply", "page", "lock"} else [])
        for n in readers.READERS
    ],
)
def test_good_folders_are_accepted(name: str, scratch: Path) -> None:
    """Else nothing that is damaged would be read far enough to be found."""
    reader = readers.READERS[name]
    (scratch / f"good-{name}").mkdir()
    readers.SCRATCH[:] = [scratch / f"good-{name}"]
    (scratch / f"good-{name}" / name).mkdir()
    try:
        for seed in reader.seeds(scratch / f"good-{name}" / name):
            fill(scratch / "input", seed)
            assert outcome(reader, scratch / "input") == ("accepted", ""), name
    finally:
        readers.SCRATCH[:] = [scratch]
