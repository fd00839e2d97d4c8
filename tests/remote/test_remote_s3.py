"""Models in an S3 store: the same bytes as from folders, and no state in which a part is taken for a model."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import isomerge
import models
from commands import said, verb
from isomerge.checkpoint import object_store, open_checkpoint
from isomerge.checkpoint.object_store import ObjectStore
from isomerge.checkpoint.remote import MARKER
from isomerge.checkpoint.upload import Upload, uploading
from isomerge.errors import CheckpointError, RequestError

DECIDING = ("model.safetensors", "config.json", "generation_config.json")


@pytest.fixture(autouse=True)
def _own_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))


def sharded(folder: Path, seed: int, shards: int) -> Path:
    """A model of so many files, which transformers would look for in this order: index, then single file."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    names = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    names = names if shards > 1 else ["model.safetensors"]
    for number, name in enumerate(names):
        save_file({f"w{number}": torch.randn(4, 4)}, folder / name, metadata={"format": "pt"})
    if shards > 1:
        entries = ", ".join(f'"w{number}": "{name}"' for number, name in enumerate(names))
        (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{entries}}}}}')
    (folder / "config.json").write_text(f'{{"seed": {seed}}}')
    (folder / "tokenizer.json").write_text(f'"of {seed}"')
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def send(new: Path, url: str, force: bool = True) -> None:
    """As a merge does it: fill the local folder, unless an earlier run has, then upload."""
    with uploading(url, force=force) as upload:
        if not upload.folder.exists():
            shutil.copytree(new, upload.folder)
        upload.run()


@pytest.fixture
def pair(bucket) -> tuple[list[Path], list[str]]:
    folders = [models.model("llama", seed=seed) for seed in (0, 1)]
    return folders, [bucket.put(folder, f"in/{name}") for folder, name in zip(folders, "ab", strict=True)]


@pytest.mark.parametrize("words", ["merge --align", pytest.param("align", marks=pytest.mark.slow)])
def test_what_is_made_of_objects_equals_what_is_made_of_folders(bucket, pair, tmp_path, words):
    """Both with the command line, whose record names addresses and never the folder in between."""
    folders, addresses = pair
    record = said(*words.split(), *addresses, "-o", f"{bucket.url}/out")
    said(*words.split(), *folders, "-o", tmp_path / "out")
    there = bucket.files("out")
    for file in DECIDING:
        assert there[file] == (tmp_path / "out" / file).read_bytes(), file
    assert record["out"] == f"{bucket.url}/out" and f"{bucket.url}/out/config.json" in record["files"]
    assert record["report"] == f"{bucket.url}/out/report.html" and MARKER not in there
    assert set(there) == {path.name for path in (tmp_path / "out").iterdir()}
    assert not any(secret in content for content in there.values() for secret in (b"test-secret", b"test-key"))
    assert not [path for path in (tmp_path / "scratch").glob("isomerge-[0-9]*/*")]


@pytest.mark.slow
def test_a_model_in_a_store_is_checked_verified_and_made_again(bucket, pair):
    folders, addresses = pair
    assert said("check", *addresses)["verdict"] == said("check", *folders)["verdict"]
    said("merge", *addresses, "-o", f"{bucket.url}/out")
    assert said("verify", f"{bucket.url}/out")["verdict"] == "good"
    assert said("reproduce", f"{bucket.url}/out")["verdict"] == "identical"
    bucket.client.put_object(Bucket=bucket.name, Key="out/generation_config.json", Body=b"{}")
    assert verb("verify", f"{bucket.url}/out").exit_code == 1


def test_python_saves_to_an_address(bucket, tmp_path):
    folders = [models.model("llama", seed=seed) for seed in (0, 1)]
    merged = isomerge.merge(list(folders))
    written = merged.save(f"{bucket.url}/out")
    assert written.url == os.fspath(written) == f"{bucket.url}/out"
    assert written.sha256 == isomerge.merge(list(folders)).save(tmp_path / "local").sha256
    assert open_checkpoint(written).read("model.norm.weight").equal(merged.state_dict()["model.norm.weight"])
    with pytest.raises(RequestError, match="nothing is overwritten unasked"):
        merged.save(f"{bucket.url}/out")


class Killed(KeyboardInterrupt):
    """Stands for a kill: nothing of the program runs after it."""


def killing(monkeypatch: pytest.MonkeyPatch, moment: int, *, after: bool) -> None:
    """Stop at the so many-th change of the store, before it or when it was made."""
    left = [moment]

    def dying(name: str):
        real = getattr(ObjectStore, name)

        def change(self: ObjectStore, *arguments):
            left[0] -= 1
            if left[0] == 0 and not after:
                raise Killed
            done = real(self, *arguments)
            if left[0] == 0:
                raise Killed
            return done

        return change

    for name in ("write", "delete", "upload"):
        monkeypatch.setattr(ObjectStore, name, dying(name))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("old", "new"), [(3, 1), pytest.param(0, 2, marks=pytest.mark.slow), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_no_moment_of_a_replacement_shows_a_part_as_a_model(bucket, tmp_path, old, new, after):
    """Every change of the store in turn is the last one of a run; the run after it ends with the new model alone."""
    before = contents(sharded(tmp_path / "old", 1, old)) if old else {}
    wanted = contents(sharded(tmp_path / "new", 2, new))
    for moment in range(1, 40):
        prefix, url = f"out{moment}", f"{bucket.url}/out{moment}"
        if old:
            bucket.put(tmp_path / "old", prefix)
        with pytest.MonkeyPatch.context() as patch:
            killing(patch, moment, after=after)
            try:
                send(tmp_path / "new", url)
                break
            except Killed:
                pass
        there = bucket.files(prefix)
        marked = there.pop(MARKER, None) is not None
        if "config.json" in there:  # what transformers would load
            assert there in (wanted, before), (moment, sorted(there))
        if marked:
            with pytest.raises(CheckpointError, match="upload .* was interrupted"):
                open_checkpoint(url)
        else:
            assert there in (before, wanted), (moment, sorted(there))
        send(tmp_path / "new", url)
        assert bucket.files(prefix) == wanted, moment
    else:
        raise AssertionError("the run never came to its end")
    assert moment > 5


def test_a_second_run_sends_only_what_is_missing(bucket, tmp_path, monkeypatch):
    new, sent = sharded(tmp_path / "new", 2, 3), []
    with pytest.MonkeyPatch.context() as patch:
        killing(patch, 4, after=False)  # the marker and two files are there
        with pytest.raises(Killed):
            send(new, f"{bucket.url}/out", force=False)
    real = ObjectStore.upload
    monkeypatch.setattr(ObjectStore, "upload", lambda self, path, *to: sent.append(path.name) or real(self, path, *to))
    send(new, f"{bucket.url}/out", force=False)
    assert sent == ["model-00003-of-00003.safetensors", "tokenizer.json", "model.safetensors.index.json", "config.json"]
    assert bucket.files("out") == contents(new)


def test_another_writer_is_noticed_before_the_model_is_complete(bucket, tmp_path, monkeypatch):
    new = sharded(tmp_path / "new", 2, 2)
    real = ObjectStore.upload

    def upload(self, path, name, tell):
        done = real(self, path, name, tell)
        if name == "tokenizer.json":
            bucket.client.put_object(Bucket=bucket.name, Key="out/model.safetensors", Body=b"another's")
        return done

    monkeypatch.setattr(ObjectStore, "upload", upload)
    with pytest.raises(CheckpointError, match="somebody else writes there too"):
        send(new, f"{bucket.url}/out", force=False)
    assert "config.json" not in bucket.files("out")


def test_what_is_there_is_not_overwritten_unasked(bucket, tmp_path):
    url = bucket.put(sharded(tmp_path / "old", 1, 1), "out")
    with pytest.raises(RequestError, match="nothing is overwritten unasked"):
        send(sharded(tmp_path / "new", 2, 1), url, force=False)
    assert bucket.files("out") == contents(tmp_path / "old")


@pytest.mark.parametrize("words", ["merge {0} {1} -o {0}", "merge {0} {1} -o {0}/x", "align {0} {1} -o {1}"])
def test_inputs_are_never_written_to(bucket, tmp_path, words):
    a, b = (bucket.put(sharded(tmp_path / name, 1, 1), name) for name in "ab")
    done = verb(*words.format(a, b).split(), "--force")
    assert done.exit_code == 2 and "inputs are never modified" in done.output
    assert bucket.files("a") == contents(tmp_path / "a")


@pytest.mark.parametrize(
    "words", ["extract {0} b -o {1}", "merge {0} b -o hf://org/name", "merge {0} b -o https://h/x", "report {0}"]
)
def test_what_cannot_be_written_to_an_address_says_so(bucket, tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = bucket.put(sharded(tmp_path / "a", 1, 1), "a")
    done = verb(*words.format(url, f"{bucket.url}/out").split())
    assert done.exit_code == 2 and "folder" in done.output, done.output
    assert not (tmp_path / "s3:").exists() and not bucket.files("out")


def test_large_files_go_in_parts_and_parts_of_killed_runs_are_removed(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "PIECE", 5 << 20)  # the least that S3 allows
    new = tmp_path / "new"
    new.mkdir()
    save_file({"w": torch.arange(3_000_000, dtype=torch.float32)}, new / "model.safetensors", metadata={"format": "pt"})
    (new / "config.json").write_text("{}")
    for key in ("out/model.safetensors", "elsewhere/model.safetensors"):
        bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key)
    send(new, f"{bucket.url}/out", force=False)
    assert bucket.files("out") == contents(new)
    tag = bucket.client.head_object(Bucket=bucket.name, Key="out/model.safetensors")["ETag"]
    assert tag.strip('"').endswith("-3")
    unfinished = bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])
    assert [one["Key"] for one in unfinished] == ["elsewhere/model.safetensors"]


def test_object_names_cannot_leave_the_local_folder(bucket, tmp_path):
    url = bucket.put(sharded(tmp_path / "a", 1, 1), "a")
    for name in ("../escaped.json", "x/../../escaped.json", "..\\escaped.json"):
        bucket.client.put_object(Bucket=bucket.name, Key=f"a/{name}", Body=b"{}")
    model = open_checkpoint(url)
    assert sorted(path.relative_to(model.folder).as_posix() for path in model.side_files()) == ["tokenizer.json"]
    assert not list(model.folder.parent.parent.rglob("escaped*"))


def test_a_missing_bucket_is_told_from_a_broken_network(bucket):
    with pytest.raises(CheckpointError, match="no such folder, or it may not be read"):
        open_checkpoint("s3://no-such-bucket-here/model")


def test_a_folder_of_others_in_tmpdir_is_not_used(bucket, tmp_path):
    uid = getattr(os, "getuid", lambda: "user")()
    own = tmp_path / "scratch" / f"isomerge-{uid}"
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(CheckpointError, match="Set TMPDIR to a folder of your own"):
        Upload(f"{bucket.url}/out", force=False)


@pytest.mark.slow
@pytest.mark.parametrize("objects", [0, 2, 5, 8])
def test_a_merge_that_is_killed_ends_with_the_same_bytes(bucket, tmp_path, objects):
    """SIGKILL when so many objects are there; then the same command again."""
    folders = [models.model("llama", seed=seed) for seed in (0, 1)]
    words = [sys.executable, "-m", "isomerge", "merge", *map(str, folders), "--align", "--shard-size", "8KB", "-o"]
    run = subprocess.Popen([*words, f"{bucket.url}/out"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    while run.poll() is None and len(bucket.files("out")) < objects + 1:
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    there = bucket.files("out")
    if "config.json" in there:
        assert "model.safetensors.index.json" in there
    elif there:
        assert MARKER in there
    if MARKER in there or not there:
        subprocess.run([*words, f"{bucket.url}/out"], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run([*words, "local"], cwd=tmp_path, check=True, capture_output=True)
    there = bucket.files("out")
    local = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    assert set(there) == set(local)
    assert all(there[name] == local[name] for name in local if name.startswith("model") or name == "config.json")
