"""What the attack has found, read again: a value or an IsomergeError, and nothing that the safetensors library refuses.

Each finding is one damaged file in a folder that is otherwise good. `python -m fuzz` (make fuzz) finds more.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

import pytest

from fuzz import readers
from fuzz.worker import fill, outcome

STORED = sorted((Path(__file__).parent / "findings").glob("*.json"))
WITH_MODELS = {"union", "check", "verify", "studio", "request", "apply", "page", "lock", "journal", "resume", "solved"}
SLOW = {"record", "transform", "config", "merge", "statistics", "run", "words", "reproduce"}
"""Their good folders take seconds to make, as those `WITH_MODELS` do."""
SLOW_SEEDS = SLOW | WITH_MODELS


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize(
    "stored", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in SLOW else []) for p in STORED]
)
def test_findings_stay_fixed(stored: Path, scratch: Path) -> None:
    reader = readers.READERS[stored.stem]
    seeds = reader.seeds()
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
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW_SEEDS else []) for n in readers.READERS],
)
def test_good_folders_are_accepted(name: str, scratch: Path) -> None:
    """Else nothing that is damaged would be read far enough to be found."""
    reader = readers.READERS[name]
    for seed in reader.seeds():
        fill(scratch / "input", seed)
        assert outcome(reader, scratch / "input") == ("accepted", ""), name
