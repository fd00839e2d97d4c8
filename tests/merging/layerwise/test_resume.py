"""A merge that solves layer by layer goes on after a kill from the layers it has solved, to the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import isomerge
from isomerge.checkpoint.kept import KeptWork
from isomerge.choices import STAGING
from models import model
from samples import digits

METHODS: dict[str, dict[str, Any]] = {
    "mean features, aligned": {"method": "reconstruct", "align": True},
    "joint features": {"method": "reconstruct", "features": "joint"},
    "gradient steps": {"method": "reconstruct", "refine": 3, "polish": 3},
    "regmean++": {"method": "regmean++"},
}


def merged(out: Path, **options: Any) -> isomerge.Merged:
    folders = [model("vit", seed) for seed in (0, 1)]
    data: Any = digits(count=20)
    if options["method"] == "regmean++":
        data = [data, digits(first=20, count=20)]
    return isomerge.merge(folders, data=data, resume=out, threads=1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 4, 6])
@pytest.mark.parametrize("name", METHODS)
def test_stopped_after_some_parts_it_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stop: int
) -> None:
    out, stored = tmp_path / "out", KeptWork.store
    parts: list[str] = []

    def stopping(kept: KeptWork, part: str, *given: Any) -> None:
        stored(kept, part, *given)
        parts.append(part)
        if len(parts) == stop:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KeptWork, "store", stopping)
        with pytest.raises(KeyboardInterrupt):
            merged(out, **METHODS[name])
    assert len(list((out / STAGING / ".solved").iterdir())) == stop
    made: list[str] = []
    monkeypatch.setattr(KeptWork, "store", lambda kept, part, *given: (made.append(part), stored(kept, part, *given)))
    again = merged(out, **METHODS[name])
    assert made and not set(made) & set(parts), "what was solved is not solved again"
    written = again.save(out)
    whole = merged(tmp_path / "whole", **METHODS[name])
    assert written.sha256 == whole.save(tmp_path / "whole").sha256
    assert again.details == whole.details and again.notes == whole.notes
    for file in ("isomerge.json", "isomerge.lock.json"):
        assert (out / file).read_text() == (tmp_path / "whole" / file).read_text()
    assert not (out / STAGING).exists()


def test_a_failure_keeps_nothing_and_another_request_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, stored = tmp_path / "out", KeptWork.store

    def stopping(kept: KeptWork, part: str, *given: Any, error: type[BaseException] = KeyboardInterrupt) -> None:
        stored(kept, part, *given)
        if part == "stage-3":
            raise error

    monkeypatch.setattr(KeptWork, "store", lambda *given: stopping(*given, error=RuntimeError))
    with pytest.raises(RuntimeError):
        merged(out, method="reconstruct")
    assert not out.exists()
    monkeypatch.setattr(KeptWork, "store", stopping)
    with pytest.raises(KeyboardInterrupt):
        merged(out, method="reconstruct")
    made: list[str] = []
    monkeypatch.setattr(KeptWork, "store", lambda kept, part, *given: (made.append(part), stored(kept, part, *given)))
    other = merged(out, method="reconstruct", ridge=0.5)
    assert "stage-0" in made, "solved with another ridge"
    with pytest.raises(isomerge.RequestError, match="finished work of another kind"):
        other.save(out)
    assert (
        other.save(out, force=True).sha256
        == merged(tmp_path / "w", method="reconstruct", ridge=0.5).save(tmp_path / "w").sha256
    )


def test_a_kept_part_that_is_damaged_is_solved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, stored = tmp_path / "out", KeptWork.store

    def stopping(kept: KeptWork, part: str, *given: Any) -> None:
        stored(kept, part, *given)
        if part == "stage-3":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KeptWork, "store", stopping)
        with pytest.raises(KeyboardInterrupt):
            merged(out, method="reconstruct")
    kept = sorted((out / STAGING / ".solved").iterdir())
    content = kept[1].read_bytes()
    kept[1].write_bytes(content[:-8] + b"\1" * 8)
    kept[2].write_bytes(content[:50])
    assert (
        merged(out, method="reconstruct").save(out).sha256
        == merged(tmp_path / "w", method="reconstruct").save(tmp_path / "w").sha256
    )
