"""A write that does not finish leaves nothing that looks finished."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from isomerge.checkpoint import TensorInfo, open_checkpoint, write_checkpoint
from isomerge.checkpoint.journal import Commit, Journal
from isomerge.checkpoint.staging import STAGING, Staging
from isomerge.errors import CheckpointError, RequestError

PLAN = {name: TensorInfo((8,), torch.float32) for name in "abcd"}


def tensors(stop_at=None, error=None):
    for name in PLAN:
        if name == stop_at:
            raise error or RuntimeError("the solver failed")
        yield name, torch.full((8,), float(ord(name)))


def write(out, produce=None, **options):
    options = {"config": {"v": 1}, "shard_size": 64, **options}
    return write_checkpoint(out, PLAN, produce or tensors(), **options)


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize("error", [RuntimeError("solver"), KeyboardInterrupt(), OSError(errno.EIO, "input disk")])
@pytest.mark.parametrize("stop_at", ["a", "d"])
def test_a_failing_producer_leaves_nothing_and_its_error_passes_unchanged(tmp_path, error, stop_at):
    with pytest.raises(type(error)) as caught:
        write(tmp_path / "new" / "out", tensors(stop_at, error))
    assert caught.value is error
    assert files_in(tmp_path) == []


def test_an_existing_folder_is_left_as_it_was(tmp_path):
    with pytest.raises(RuntimeError):
        write(tmp_path, tensors("c"))
    assert files_in(tmp_path) == []


def test_a_forced_write_that_fails_keeps_the_older_model(tmp_path):
    out = tmp_path / "out"
    write(out, config={"v": "old"})
    before = {name: (out / name).read_bytes() for name in files_in(out)}
    with pytest.raises(RuntimeError):
        write(out, tensors("c"), force=True, shard_size="1GB")
    assert {name: (out / name).read_bytes() for name in files_in(out)} == before


@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("out", ["new", "."], ids=["new folder", "empty folder"])
def test_a_failure_while_renaming_leaves_nothing_new(tmp_path, monkeypatch, after, out):
    replace, calls = os.replace, []

    def failing(source, target):
        calls.append(target)
        if len(calls) == after + 1:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / out)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5, 6, 7])
def test_a_disk_that_fails_for_good_while_renaming_loses_nothing(tmp_path, monkeypatch, after):
    """Neither the new files can be placed nor the old ones brought back: the next run does it."""
    out = tmp_path / "out"
    write(out, config={"v": "old"})
    before = {name: (out / name).read_bytes() for name in files_in(out)}
    replace, calls = os.replace, []

    def failing(source, target):
        calls.append(target)
        if len(calls) > after:
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(CheckpointError, match=r"Nothing was left behind|Its files are safe in"):
        write(out, force=True)
    monkeypatch.undo()
    if not after:
        assert {name: (out / name).read_bytes() for name in files_in(out)} == before
    with pytest.raises(RuntimeError):  # a run that gets no further than this has put the old model in order
        write(out, tensors("a"), force=True)
    assert {name: (out / name).read_bytes() for name in files_in(out)} == before
    assert write(out, force=True).sha256 == write(tmp_path / "fresh").sha256
    assert files_in(out) == files_in(tmp_path / "fresh")


def test_config_json_is_the_last_file_to_appear(tmp_path, monkeypatch):
    replace, order = os.replace, []
    monkeypatch.setattr(os, "replace", lambda s, t: (order.append(os.path.basename(t)), replace(s, t)))
    write(tmp_path / "out")
    assert order == [
        *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)),
        "model.safetensors.index.json",
        "config.json",
    ]


def killed_while_writing(out, *, at: str, force: bool = False, config: str = '{"v": 1}') -> None:
    """Run a writer in another process that dies by SIGKILL: in the producer, or before the nth rename."""
    code = f"""
        import os, signal, sys, torch
        from isomerge.checkpoint import TensorInfo, write_checkpoint
        plan = {{name: TensorInfo((8,), torch.float32) for name in "abcd"}}
        def die(): os.kill(os.getpid(), signal.SIGKILL)
        def tensors():
            for name in plan:
                if name == {at!r}: die()
                yield name, torch.full((8,), float(ord(name)))
        replace = os.replace
        def rename(source, target):
            if os.path.basename(target) == {at!r}: die()
            replace(source, target)
        os.replace = rename
        write_checkpoint(sys.argv[1], plan, tensors(), config={config}, shard_size=64, force={force})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(out)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("at", ["d", "model-00002-of-00002.safetensors", "config.json"])
def test_kill_9_leaves_no_folder_that_looks_finished_and_a_second_run_gives_the_same_bytes(tmp_path, at):
    out = tmp_path / "out"
    killed_while_writing(out, at=at)
    assert not (out / "config.json").exists() and (out / STAGING).is_dir()
    with pytest.raises(CheckpointError, match="interrupted"):
        open_checkpoint(out)
    again, fresh = write(out), write(tmp_path / "fresh")
    assert again.sha256 == fresh.sha256 and files_in(out) == files_in(tmp_path / "fresh")


@pytest.mark.slow
def test_kill_9_of_a_forced_write_leaves_the_older_model_or_none(tmp_path):
    out = tmp_path / "out"
    write(out, config={"v": "old"})
    killed_while_writing(out, at="d", force=True)
    assert open_checkpoint(out).config == {"v": "old"}
    killed_while_writing(out, at="model.safetensors.index.json", force=True)
    with pytest.raises(CheckpointError, match="interrupted"):
        open_checkpoint(out)


def test_too_small_a_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes .* and 100 bytes .* free"):
        write(tmp_path / "new" / "out", iter([]))
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_midway_is_explained_and_cleaned(tmp_path, monkeypatch, code):
    pwrite, room = os.pwrite, [100]

    def filling(descriptor, data, offset):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(code, os.strerror(code))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", filling)
    with pytest.raises(CheckpointError, match="disk is full"):
        write(tmp_path / "out", shard_size="1GB")
    assert files_in(tmp_path) == []


def test_a_real_full_disk_is_explained(tmp_path, monkeypatch):
    """/dev/full answers every write with ENOSPC, at the flush."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    monkeypatch.setattr(Staging, "create", lambda self, name: open("/dev/full", "w+b"))  # noqa: SIM115
    with pytest.raises(CheckpointError, match="disk is full"):
        write(tmp_path / "out")
    assert files_in(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="file above it is a file"):
        write(tmp_path / "file" / "out")


def test_two_writers_do_not_mix_their_files(tmp_path):
    out = tmp_path / "out"

    def tensors_while_another_tries():
        for name, tensor in tensors():
            if name == "c":
                with pytest.raises(CheckpointError, match="another process is writing"):
                    write(out)
            yield name, tensor

    write(out, tensors_while_another_tries())
    assert open_checkpoint(out).read("d")[0] == ord("d")
    assert STAGING not in files_in(out)


def test_finished_work_of_another_run_is_not_thrown_away_unasked(tmp_path):
    out = tmp_path / "out"
    with contextlib.suppress(KeyboardInterrupt), Staging(out, force=False, key="first") as staging:
        staging.create("model.safetensors").write(b"half")
        staging.note(tensor="a")
        raise KeyboardInterrupt
    for key in ("second", None):
        with pytest.raises(RequestError, match="interrupted run has left finished work.*set force"):
            Staging(out, force=False, key=key).__enter__()
    with contextlib.suppress(KeyboardInterrupt), Staging(out, force=False, key="first") as staging:
        assert [entry.tensor for entry in staging.finished()] == ["a"]
        assert staging.reopen("model.safetensors", 4) is not None
        raise KeyboardInterrupt
    with contextlib.suppress(KeyboardInterrupt), Staging(out, force=True, key="second") as staging:
        assert staging.finished() == [] and staging.reopen("model.safetensors", 4) is None
        raise KeyboardInterrupt


def test_a_line_of_the_journal_that_was_changed_counts_as_never_written(tmp_path: Path) -> None:
    """It may still be JSON of the right kind: the plan of a commit without its last file."""
    journal = Journal(tmp_path)
    journal.begin("a key")
    journal.note(tensor="a", hash="0" * 64)
    journal.note_commit(Commit(["model.safetensors", "config.json"]))
    assert Journal(tmp_path).commit == Commit(["model.safetensors", "config.json"])
    journal.path.write_bytes(journal.path.read_bytes().replace(b', "config.json"', b""))
    changed = Journal(tmp_path)
    assert changed.key == "a key" and len(changed.tensors) == 1 and changed.commit is None
