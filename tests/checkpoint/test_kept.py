"""What was solved is taken over as it was stored, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isomerge.checkpoint.kept import KeptWork


@pytest.mark.parametrize(
    ("stored", "damaged"),
    [(b"[2,3]", b"[3,2]"), (b'"F32"', b'"I32"'), (b'"key":"k', b'"key":"j'), (b"notes", b"nodes")],
)
def test_a_part_with_a_damaged_header_is_solved_again(tmp_path: Path, stored: bytes, damaged: bytes) -> None:
    kept = KeptWork(tmp_path, "k" * 64)
    kept.store("part", {"a": torch.arange(6.0).reshape(2, 3)}, {"notes": ["one"]})
    (path,) = tmp_path.rglob("*.safetensors")
    content = path.read_bytes()
    found = kept.load("part")
    assert found is not None and found[0]["a"].shape == (2, 3) and found[1] == {"notes": ["one"]}
    assert content.count(stored) == 1
    path.write_bytes(content.replace(stored, damaged))
    assert kept.load("part") is None
