"""What a run that is made again may take over: nothing that a power cut or a rewritten input has spoilt."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import isomerge
from commands import verb
from isomerge.choices import STAGING
from isomerge.errors import CheckpointError, RequestError
from isomerge.merging.run.jobs import Job
from models import gpt2, model


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    for name, seed in (("a", 0), ("b", 1)):
        shutil.copytree(model("llama", seed, dtype=torch.float32), tmp_path / name)
    return [tmp_path / "a", tmp_path / "b"]


def merge(folders: list[Path], out: Path, **options: Any) -> Any:
    return isomerge.merge(folders, threads=1, **options).save(out, shard_size="2KB")


def interrupted(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any], after: int = 8) -> None:
    """Stop a merge when some of its tensors are finished."""
    pieces, count = Job.pieces, [0]

    def stopping(job: Job) -> Iterator[Any]:
        count[0] += 1
        if count[0] > after:
            raise KeyboardInterrupt
        yield from pieces(job)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "pieces", stopping)
        with pytest.raises(KeyboardInterrupt):
            work()


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same(found: Path, expected: Path) -> bool:
    """The same files, but for the name of the folder in the card."""
    return content(found) == {
        name: data.replace(expected.name.encode(), found.name.encode()) for name, data in content(expected).items()
    }


# --- what a power cut took --------------------------------------------------------------------------------------------
def test_a_header_that_a_power_cut_took_is_written_again(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupted(monkeypatch, lambda: merge(folders, out))
    for staged in (out / STAGING).glob("*.safetensors"):
        with staged.open("r+b") as file:
            length = 8 + int.from_bytes(file.read(8), "little")
            file.seek(0)
            file.write(bytes(length))
    merge(folders, out)
    assert same(out, _whole(folders, tmp_path))
    assert len({name for shard in out.glob("*.safetensors") for name in load_file(shard)}) == len(
        load_file(folders[0] / "model.safetensors")
    )


@pytest.mark.parametrize("damage", ["the hash is gone", "the hash is null"])
def test_a_tensor_without_its_hash_is_written_again(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Nothing would tell its bytes from those that a power cut left, and the lock file would lack it."""
    out = tmp_path / "out"
    interrupted(monkeypatch, lambda: merge(folders, out))
    journal = out / STAGING / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert sum("hash" in line for line in lines) > 2
    for line in lines:
        if line.pop("hash", None) and damage == "the hash is null":
            line["hash"] = None
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for staged in (out / STAGING).glob("*.safetensors"):
        staged.write_bytes(bytes(staged.stat().st_size))
    merge(folders, out)
    assert same(out, _whole(folders, tmp_path))


def _whole(folders: list[Path], tmp_path: Path, **options: Any) -> Path:
    merge(folders, tmp_path / "wholly", **options)
    return tmp_path / "wholly"


# --- everything that decides the result -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "README.md"])
def test_a_file_beside_the_weights_that_changed_is_other_work(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for folder in folders:
        for other in ("tokenizer_config.json", "README.md"):
            (folder / other).write_text("{}")
    interrupted(monkeypatch, lambda: merge(folders, tmp_path / "out"))
    path = folders[1] / name
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, "added_later": 1}))
    with pytest.raises(RequestError, match="finished work of another kind"):
        merge(folders, tmp_path / "out")
    path.write_text(json.dumps(known))
    path.write_bytes((model("llama", 1, dtype=torch.float32) / name).read_bytes() if len(known) else b"{}")
    assert merge(folders, tmp_path / "out").sha256 == merge(folders, tmp_path / "fresh").sha256


def test_a_changed_scale_of_an_adapter_is_other_work(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, name = tmp_path / "adapter", "model.layers.0.mlp.down_proj"
    rows, columns = load_file(folders[0] / "model.safetensors")[f"{name}.weight"].shape
    adapter.mkdir()
    lora = {"lora_A.weight": torch.ones(2, columns), "lora_B.weight": torch.ones(rows, 2)}
    save_file({f"base_model.model.{name}.{k}": v for k, v in lora.items()}, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 16, "target_modules": ["down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    models = [f"{folders[0]}+{adapter}", str(folders[1])]
    interrupted(monkeypatch, lambda: merge(models, tmp_path / "out"), after=20)  # type: ignore[arg-type]
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 32}))
    with pytest.raises(RequestError, match="finished work of another kind"):
        merge(models, tmp_path / "out")  # type: ignore[arg-type]


def test_a_tokenizer_that_changed_under_a_union_is_other_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ids decide which row of the embedding is whose: old and new ones must not meet in one table."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        gpt2(folder, seed=seed)
    interrupted(monkeypatch, lambda: merge(folders, tmp_path / "out", tokenizer="union"))
    path = folders[1] / "tokenizer.json"
    known = json.loads(path.read_text())
    words = known["model"]["vocab"]
    words["cat"], words["dog"] = words["dog"], words["cat"]
    path.write_text(json.dumps(known))
    with pytest.raises(RequestError, match="finished work of another kind"):
        merge(folders, tmp_path / "out", tokenizer="union")
    isomerge.merge(folders, threads=1, tokenizer="union").save(tmp_path / "out", shard_size="2KB", force=True)
    assert same(tmp_path / "out", _whole(folders, tmp_path, tokenizer="union"))


# --- inputs that change while they are read ---------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["in place", "replaced", "config"])
def test_an_input_that_is_rewritten_while_a_merge_runs_is_noticed(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    pieces, count = Job.pieces, [0]
    path = folders[1] / "model.safetensors"
    other = {name: tensor + 1 for name, tensor in load_file(path).items()}

    def rewriting(job: Job) -> Iterator[Any]:
        count[0] += 1
        if count[0] == 5 and how == "config":
            (folders[1] / "config.json").write_text((folders[1] / "config.json").read_text() + " ")
        elif count[0] == 5:
            save_file(other, tmp_path / "new", metadata={"format": "pt"})
            data = (tmp_path / "new").read_bytes()
            path.write_bytes(data) if how == "in place" else os.replace(tmp_path / "new", path)
        yield from pieces(job)

    monkeypatch.setattr(Job, "pieces", rewriting)
    with pytest.raises(CheckpointError, match=r"changed (while it was being read|since it was opened)"):
        merge(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_alignment_notices_that_its_anchor_was_rewritten(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alignment = isomerge.align(folders[1], folders[0], threads=1)
    path = folders[0] / "model.safetensors"
    save_file({n: t * 2 for n, t in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"changed (while it was being read|since it was opened)"):
        alignment.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- stopped at the very end ------------------------------------------------------------------------------------------
def test_a_run_that_was_stopped_before_it_removed_its_staging_folder_is_ended_by_the_same_command(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is complete, and both `verify` and the same command say so."""
    line = ("merge", "a", "b", "-o", "out", "--threads", "1")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("isomerge.checkpoint.staging.shutil.rmtree", killed)
        patch.setattr(Path, "rmdir", killed)
        patch.setattr("isomerge.checkpoint.writer.finish_output", killed, raising=False)
        assert verb(*line, folder=tmp_path).exit_code == 130
    assert (tmp_path / "out" / "config.json").exists() and (tmp_path / "out" / STAGING).exists()
    assert isomerge.verify(tmp_path / "out").verdict == "good"
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").glob("*.safetensors")}
    done = verb(*line, folder=tmp_path)
    assert done.exit_code == 0, done.output
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").glob("*.safetensors")} == before
    assert not (tmp_path / "out" / STAGING).exists()
    assert verb(*line, folder=tmp_path).exit_code == 2, "now it is a model that is in the way"


# --- replacing a model ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("at", [1, 2, 5, 8, 13])
def test_an_error_while_a_model_is_replaced_leaves_the_old_one(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, code: int
) -> None:
    out = tmp_path / "out"
    shutil.copytree(folders[1], out)
    (out / "README.md").write_text("of the old model")
    before = content(out)
    replace, count = os.replace, [0]

    def failing(source: Any, target: Any) -> None:
        count[0] += 1
        if count[0] == at:
            raise OSError(code, os.strerror(code))
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(CheckpointError, match="While writing"):
        isomerge.merge(folders, threads=1).save(out, shard_size="4KB", force=True)
    assert content(out) == before
    monkeypatch.undo()
    isomerge.merge(folders, threads=1).save(out, shard_size="4KB", force=True)
    assert content(out)["config.json"] and (out / "README.md").read_text() != "of the old model"


# --- journals ---------------------------------------------------------------------------------------------------------
LINES = [
    "[]", "3", "null", "{}", '"tensor"', "{", '{"tensor": []}', '{"tensor": "lm_head.weight", "hash": 5}',
    '{"tensor": "lm_head.weight", "hash": null, "vanished": "many"}', '{"tensor": {"a": 1}, "vanished": {}}',
    '{"commit": 3}', '{"commit": {"files": ["../../a/config.json"], "old": []}}', '{"commit": {"files": [3]}}',
    '{"tensor": "lm_head.weight", "vanished": 1e999}', "[" * 100_000, '{"tensor": "x", "vanished": ' + "9" * 5000 + "}",
    "\x00" * 64, "\udcff\udcfe", '{"undone": "perhaps"}',
]  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
@pytest.mark.parametrize("place", [0, 1, 3])
def test_no_line_of_a_journal_breaks_the_run_that_reads_it(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, place: int
) -> None:
    out = tmp_path / "out"
    interrupted(monkeypatch, lambda: merge(folders, out), after=4)
    journal = out / STAGING / "journal.jsonl"
    lines = journal.read_bytes().split(b"\n")
    lines[place] = line.encode("utf-8", "surrogateescape")
    journal.write_bytes(b"\n".join(lines))
    before = content(folders[0])
    merge(folders, out)
    assert content(folders[0]) == before and not (out / STAGING).exists()
    assert content(out)["model.safetensors.index.json"]
