"""What a run that was stopped has left in its staging folder, and the same run again."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fuzz import mutators as m
from fuzz.commands import Command, run_command
from fuzz.injector import KILLED, Injector
from fuzz.readers.checkpoints import with_few_tensors
from fuzz.readers.registry import Seed, content_of, reader

JOURNAL = "out/.isomerge-partial/journal.jsonl"
MERGE = ["merge", "a", "b", "-o", "out", "--threads", "1", "--shard-size", "900", "--force"]


@cache
def _place() -> Path:
    """A folder with the inputs of the commands, under their relative names."""
    from fuzz.worker import fill
    from models import model, scratch

    place = scratch() / "interrupted" / "work"
    place.mkdir(parents=True)
    for name, kind, seed in (("a", "llama", 0), ("b", "llama", 1), ("v", "vit", 0), ("w", "vit", 1)):
        content = content_of(model(kind, seed, torch.float32))
        fill(place / name, with_few_tensors(content) if kind == "llama" else content)
    return place


def _killed(words: list[str], *calls: str, old: Seed | None = None) -> list[Seed]:
    """The folders that a command leaves when it dies at the last call of each kind."""
    from fuzz.worker import fill

    work, command, found = _place(), Command(words[0], words), []

    def run(at: int = 0) -> tuple[int, list[str]]:
        shutil.rmtree(work / "out", ignore_errors=True)
        if old is not None:
            fill(work / "out", old)
        return run_command(command, work, Injector(work, at))

    code, made = run()
    assert code == 0, (work.parent / "told").read_text()
    for call in calls:
        at = max((number for number, one in enumerate(made, start=1) if call in one), default=0)
        if at == 0:
            continue  # without jinja2 there is no report
        code, _ = run(at)
        assert code == KILLED
        found.append({f"out/{name}": content for name, content in content_of(work / "out").items()})
    shutil.rmtree(work / "out", ignore_errors=True)
    return found


@cache
def _stopped_merges() -> list[Seed]:
    """Half written, before the first rename, among the renames, and complete but for its report."""
    old = {**content_of(_place() / "b"), "README.md": b"# The old model"}
    staged = "out/.isomerge-partial"
    renames = ("replace out/config.json", f"replace {staged}/config.json")
    return _killed(MERGE, f"write {staged}/model-00003", *renames, "out/.report.html", old=old)


@reader("journal", _stopped_merges, {JOURNAL: m.mutate_jsonl})
def read_journal(folder: Path) -> None:
    """As everything that opens a folder asks it."""
    from isomerge.checkpoint.journal import Journal
    from isomerge.checkpoint.staging import is_unfinished, was_interrupted

    journal = Journal((folder / JOURNAL).parent)
    was_interrupted(folder / "out")
    is_unfinished(folder / "out")
    for line in journal.tensors:
        assert line.tensor is not None
    if journal.commit is not None:
        inside = [(folder / "out" / name).resolve() for name in (*journal.commit.files, *journal.commit.old)]
        assert all((folder / "out").resolve() in path.parents for path in inside), "a rename leaves the folder"


def _weights(folder: Path) -> dict[str, bytes]:
    kept = ("config.json", "isomerge.lock.json")
    return {name: data for name, data in content_of(folder).items() if name in kept or name.startswith("model")}


@cache
def _whole() -> dict[str, bytes]:
    work = _place()
    shutil.rmtree(work / "whole", ignore_errors=True)
    _merge(work / "whole")
    return _weights(work / "whole")


def _merge(out: Path) -> None:
    import isomerge

    before = Path.cwd()
    os.chdir(_place())  # the key of a run has the names of its inputs as they were given
    try:
        isomerge.merge(["a", "b"], threads=1).save(out, force=True, shard_size="900")
    finally:
        os.chdir(before)


STAGED = {
    name: m.mutate_bytes for name in (f"out/.isomerge-partial/model-0000{n}-of-00003.safetensors" for n in (1, 2))
}


def _resumed_seeds() -> list[Seed]:
    _whole()
    return _stopped_merges()


@reader("resume", _resumed_seeds, {JOURNAL: m.mutate_jsonl, **dict.fromkeys(STAGED, m.mutate_bytes)})
def read_and_resume(folder: Path) -> None:
    """Whatever the journal and the staged files say, the same command makes the same model."""
    _merge(folder / "out")
    assert _weights(folder / "out") == _whole(), "the model is not the one it should be"


# --- what was solved before the first tensor is written ---------------------------------------------------------------
SOLVED = "out/.isomerge-partial/.solved/part.safetensors"


@cache
def _stopped_solvers() -> list[Seed]:
    from fuzz.commands import pictures

    data = pictures(_place().parent / "pictures")
    reconstruct = ["merge", "v", "w", "--method", "reconstruct", "--data", str(data), "-o", "out", "--threads", "1"]
    align = ["align", "w", "v", "-o", "out", "--threads", "1"]
    stopped = [*_killed(reconstruct, ".isomerge-partial/model"), *_killed(align, ".isomerge-partial/model")]
    seeds = [
        {SOLVED: content, "name": Path(name).name.encode()}
        for seed in stopped
        for name, content in seed.items()
        if "/.solved/" in name
    ]
    assert len(seeds) > 4
    return seeds


@cache
def _known(name: str) -> tuple[str, str, dict[str, torch.Tensor]]:
    """Its key, its own name and its tensors, by the name of the file."""
    from safetensors import safe_open
    from safetensors.torch import load

    for seed in _stopped_solvers():
        if seed["name"].decode() == name:
            path = _place().parent / "known.safetensors"
            path.write_bytes(seed[SOLVED])
            with safe_open(path, framework="pt") as file:
                about = file.metadata()
            return about["key"], about["name"], load(seed[SOLVED])
    raise KeyError(name)


@reader("solved", _stopped_solvers, {SOLVED: m.mutate_safetensors})
def read_solved(folder: Path) -> None:
    """A part is what was stored, or not there."""
    from isomerge.checkpoint.kept import KeptWork

    key, name, tensors = _known((folder / "name").read_text())
    (folder / SOLVED).rename((folder / SOLVED).with_name(f"{key[:16]}-{name}.safetensors"))
    part: Any = KeptWork(folder / "out", key).load(name)
    if part is not None:
        assert part[0].keys() == tensors.keys() and all(same(part[0][one], tensors[one]) for one in tensors)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)
