"""A distillation that was killed goes on from its last checkpoint, to the same bytes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
from isomerge.checkpoint.kept import KeptWork
from isomerge.choices import STAGING
from isomerge.merging.layerwise.gradient_steps import descend
from isomerge.running import kept_steps
from models import model
from samples import digits


def distilled(out: Path, **options: Any) -> isomerge.Merged:
    folders = [model("vit", seed) for seed in (0, 1, 2)]
    return isomerge.distill(
        folders[:2], folders[2], data=str(digits(count=40)), batch_size=8, goals="mean", resume=out, progress=False,
        **{"steps": 23, "rate": 0.01, **options},
    )  # fmt: skip


@pytest.mark.parametrize("stop", [1, 9, 23])
def test_stopped_after_some_steps_it_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    out, stored = tmp_path / "out", KeptWork.store
    monkeypatch.setattr(kept_steps, "SECONDS", 0.0)
    steps: list[int] = []

    def stopping(kept: KeptWork, part: str, tensors: Any, record: Any) -> None:
        stored(kept, part, tensors, record)
        steps.append(record["steps"])
        if len(steps) == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(KeptWork, "store", stopping)
    with pytest.raises(KeyboardInterrupt):
        distilled(out)
    assert steps == list(range(1, stop + 1))
    written = (again := distilled(out)).save(out)
    assert steps == list(range(1, 24)), "no step is made twice"
    whole = distilled(tmp_path / "whole")
    assert written.sha256 == whole.save(tmp_path / "whole").sha256
    assert again.details == whole.details and again.notes == whole.notes
    for file in ("model.safetensors", "isomerge.json", "isomerge.lock.json"):
        assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert not (out / STAGING).exists()


def test_another_request_takes_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, stored = tmp_path / "out", KeptWork.store
    monkeypatch.setattr(kept_steps, "SECONDS", 0.0)

    def stopping(kept: KeptWork, *given: Any) -> None:
        stored(kept, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KeptWork, "store", stopping)
        with pytest.raises(KeyboardInterrupt):
            distilled(out)
    other = distilled(out, rate=0.02)
    with pytest.raises(isomerge.RequestError, match="finished work of another kind"):
        other.save(out)
    assert other.save(out, force=True).sha256 == distilled(tmp_path / "o", rate=0.02).save(tmp_path / "o").sha256


def test_polishing_goes_on_from_its_steps_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step of reconstruct is made of the same steps."""
    out, stored = tmp_path / "out", KeptWork.store
    monkeypatch.setattr(kept_steps, "SECONDS", 0.0)

    def merged(place: Path) -> isomerge.Merged:
        folders = [model("vit", seed) for seed in (0, 1)]
        return isomerge.merge(
            folders, method="reconstruct", data=str(digits(count=20)), polish=6, start="merge", rate=0.003,
            resume=place, threads=1, progress=False,
        )  # fmt: skip

    steps: list[int] = []

    def stopping(kept: KeptWork, part: str, tensors: Any, record: Any = None) -> None:
        stored(kept, part, tensors, record)
        if part == "polishing":
            steps.append(record["steps"])
            if len(steps) == 4:
                raise KeyboardInterrupt

    monkeypatch.setattr(KeptWork, "store", stopping)
    with pytest.raises(KeyboardInterrupt):
        merged(out)
    written = merged(out).save(out)
    assert steps == [1, 2, 3, 4, 5, 6]
    assert written.sha256 == merged(tmp_path / "whole").save(tmp_path / "whole").sha256


CHILD = """
import sys
import isomerge
from isomerge.running import kept_steps
from isomerge.merging.layerwise.gradient_steps import descend
kept_steps.SECONDS = 0.0
first, second, student, data, out = sys.argv[1:]
made = isomerge.distill([first, second], student, data={"path": data, "batch_size": 8}, goals="mean", steps=400,
                        rate=0.01, resume=out, progress=False)
print(made.save(out).sha256)
"""


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    folders = [str(model("vit", seed)) for seed in (0, 1, 2)]

    def start(out: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, *folders, str(digits(count=40)), str(out)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    whole, _ = start(tmp_path / "whole").communicate(timeout=300)
    out, kills = tmp_path / "out", 0
    kept = out / STAGING / ".solved"
    for _ in range(3):
        before = {path: path.stat().st_mtime_ns for path in kept.glob("*.safetensors")} if kept.is_dir() else {}
        child = start(out)
        while child.poll() is None:
            now = {path: path.stat().st_mtime_ns for path in kept.glob("*.safetensors")} if kept.is_dir() else {}
            if now and now != before:
                time.sleep(0.05)
                child.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        kills += child.wait() == -signal.SIGKILL
    assert kills == 3 and not (out / "model.safetensors").exists()
    again, _ = start(out).communicate(timeout=300)
    assert again == whole and again.strip()


def test_parameters_without_a_part_in_the_loss_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_steps, "SECONDS", 0.0)

    def after(steps: int, kept: kept_steps.KeptSteps | None = None) -> list[torch.Tensor]:
        used, unused = torch.ones(3), torch.full((2,), 5.0)

        def loss(number: int) -> torch.Tensor:
            if number == steps:
                raise KeyboardInterrupt
            return (used - number).square().sum()

        with contextlib.suppress(KeyboardInterrupt):
            descend([used, unused], loss, iter(range(9)), 9, 0.1, kept=kept)
        return [used, unused]

    whole = after(9)
    after(4, kept_steps.KeptSteps(KeptWork(tmp_path, "a" * 64), "steps"))
    again = after(9, kept_steps.KeptSteps(KeptWork(tmp_path, "a" * 64), "steps"))
    assert torch.equal(whole[0], again[0]) and not torch.equal(whole[0], torch.ones(3))
    assert whole[1].tolist() == again[1].tolist() == [5.0, 5.0]
