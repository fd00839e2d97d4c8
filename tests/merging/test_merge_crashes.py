"""A merge that does not finish leaves nothing that looks finished, and the next run ends with the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import isomerge
from commands import hear_ctrl_c
from isomerge.checkpoint import TensorInfo, open_checkpoint, write_checkpoint
from isomerge.checkpoint.staging import STAGING
from isomerge.errors import CheckpointError, RequestError

SHAPE, COUNT = (384, 512), 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models of some nine megabytes each: large enough to be killed in the middle."""
    folder = tmp_path_factory.mktemp("models")
    plan = {f"model.layers.{i}.mlp.weight": TensorInfo(SHAPE, torch.bfloat16) for i in range(COUNT)}
    found = {}
    for seed, name in enumerate(["base", "a", "b"]):
        generator = torch.Generator().manual_seed(seed)
        stream = ((n, torch.randn(SHAPE, generator=generator).bfloat16()) for n in plan)
        write_checkpoint(folder / name, plan, stream, config={"num_hidden_layers": COUNT, "from": name})
        found[name] = folder / name
    return found


def recipe(models: dict[str, Path], method: str = "dare_ties") -> str:
    return textwrap.dedent(f"""
        merge_method: {method}
        base_model: {models["base"]}
        models:
        - model: {models["a"]}
        - model: {models["b"]}
        parameters: {{density: 0.5}}
        """)


# Imports once; every trial is a child of its own, killed soon after a random number of its tensors is done. A moment
# drawn from the time that a whole merge takes would come too late wherever the second merge is much faster. A busy
# machine may still wake this process when the child has finished: such a trial does not count, and another is made.
DRIVER = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
import isomerge
from isomerge.checkpoint.staging import STAGING

recipe, folder, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

def child(out):
    pid = os.fork()
    if pid == 0:
        written = isomerge.merge_recipe(recipe).save(out, shard_size="3MB")
        (folder / "sha").write_text(written.sha256)
        os._exit(0)
    return pid

def lines_of(journal):
    try:
        return journal.read_bytes().count(10)
    except FileNotFoundError:  # not begun yet, or finished
        return 0

os.waitpid(child(folder / "whole"), 0)
expected = (folder / "sha").read_text()
files = {p.name: p.read_bytes() for p in (folder / "whole").iterdir()}
found = []
random.seed(int(sys.argv[4]))
while sum(trial["killed"] for trial in found) < kills and len(found) < 10 * kills:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    journal = out / STAGING / "journal.jsonl"
    lines, ended = random.randrange(1, 20), 0
    pid = child(out)
    while not ended and lines_of(journal) < lines:
        ended, status = os.waitpid(pid, os.WNOHANG)
    time.sleep(random.uniform(0, 0.003))
    if not ended:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status)
    looks_finished = (out / "config.json").exists()
    kept = len(journal.read_text().splitlines()) - 1 if journal.exists() else 0
    if not looks_finished:
        os.waitpid(child(out), 0)
    again = {p.name: p.read_bytes() for p in out.iterdir()}
    same = {k: v.replace(b"whole", b"out") for k, v in files.items()} == again
    found.append({"killed": killed, "finished": looks_finished, "kept": kept, "same": same,
                  "sha": (folder / "sha").read_text() == expected})
print(json.dumps(found))
"""


def trials(models: dict[str, Path], folder: Path, kills: int, seed: int) -> list[dict[str, object]]:
    command = [sys.executable, "-c", DRIVER, recipe(models), str(folder), str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_killed_at_six_random_moments_each_rerun_ends_with_the_same_bytes(
    models: dict[str, Path], tmp_path: Path
) -> None:
    found = trials(models, tmp_path, 6, seed=1)
    assert all(trial["same"] and trial["sha"] for trial in found), found
    assert sum(bool(trial["killed"]) for trial in found) == 6, found  # or nothing was tried


def test_what_was_finished_is_kept_and_not_made_again(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after some tensors, the second run computes only the others."""
    from isomerge.merging.run.jobs import Job

    made: list[str] = []
    pieces = Job.pieces

    def stopping(self: Job):  # type: ignore[no-untyped-def]
        made.append(self.name)
        if len(made) == 10:
            raise KeyboardInterrupt
        yield from pieces(self)

    monkeypatch.setattr(Job, "pieces", stopping)
    with pytest.raises(KeyboardInterrupt):
        isomerge.merge_recipe(recipe(models), threads=1).save(tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    with pytest.raises(CheckpointError, match="interrupted"):
        open_checkpoint(tmp_path / "out")
    journal = (tmp_path / "out" / STAGING / "journal.jsonl").read_text().splitlines()
    kept = {json.loads(line)["tensor"] for line in journal[1:]}
    before = len(made)
    written = isomerge.merge_recipe(recipe(models), threads=1).save(tmp_path / "out")
    every = {f"model.layers.{i}.mlp.weight" for i in range(COUNT)}
    assert len(kept) >= 9 and set(made[before:]) == every - kept
    monkeypatch.undo()
    assert written.sha256 == isomerge.merge_recipe(recipe(models)).save(tmp_path / "whole").sha256
    assert not (tmp_path / "out" / STAGING).exists()


def interrupt(models: dict[str, Path], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that the user stops at its tenth tensor."""
    from isomerge.merging.run.jobs import Job

    pieces, count = Job.pieces, [0]

    def stopping(self: Job):  # type: ignore[no-untyped-def]
        count[0] += 1
        if count[0] == 10:
            raise KeyboardInterrupt
        yield from pieces(self)

    monkeypatch.setattr(Job, "pieces", stopping)
    with pytest.raises(KeyboardInterrupt):
        isomerge.merge_recipe(recipe(models), threads=1).save(out)
    monkeypatch.undo()


def test_another_recipe_or_a_changed_input_does_not_go_on_from_old_tensors(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(models, tmp_path / "out", monkeypatch)
    other = isomerge.merge_recipe(recipe(models, "ties"))
    with pytest.raises(RequestError, match="left finished work of another kind.*set force"):
        other.save(tmp_path / "out")
    assert list((tmp_path / "out" / STAGING).glob("*.safetensors")), "it waits for its own command"
    assert other.save(tmp_path / "out", force=True).sha256 == other.save(tmp_path / "fresh").sha256


def test_a_staged_tensor_that_was_damaged_is_made_again(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut took from the disk's cache does not come back as a finished tensor."""
    interrupt(models, tmp_path / "out", monkeypatch)
    (staged,) = (tmp_path / "out" / STAGING).glob("*.safetensors")
    length = int.from_bytes(staged.read_bytes()[:8], "little")
    with staged.open("r+b") as file:
        file.seek(8 + length)
        file.write(bytes(staged.stat().st_size - 8 - length))
    found = isomerge.merge_recipe(recipe(models)).save(tmp_path / "out")
    assert found.sha256 == isomerge.merge_recipe(recipe(models)).save(tmp_path / "whole").sha256


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_words_and_the_rerun_finishes(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "r.yml").write_text(recipe(models))
    command = [sys.executable, "-m", "isomerge", "merge", "r.yml", "-o", "out", "--threads", "1"]
    # A merge of small models is over in no time: slow every tensor down, in the child only.
    slow = "import time, isomerge.merging.run.jobs as p; old = p.Job.pieces\n"
    slow += "def pieces(self):\n    time.sleep(0.2)\n    yield from old(self)\np.Job.pieces = pieces\n"
    slow += f"import sys; sys.argv = {command[2:]!r}\nfrom isomerge.cli import main\nmain()"
    process = subprocess.Popen(
        [sys.executable, "-c", slow], cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c
    )
    journal = tmp_path / "out" / STAGING / "journal.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and len(journal.read_text().splitlines()) > 2):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130 and "Interrupted" in told and "continues" in told
    assert not (tmp_path / "out" / "config.json").exists()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "config.json").exists() and not journal.exists()


def test_an_input_that_vanishes_is_named_and_nothing_is_left(models: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(models["a"], tmp_path / "gone")
    merged = isomerge.merge([models["b"], tmp_path / "gone"])
    (tmp_path / "gone" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"gone/model\.safetensors.*No such file"):
        merged.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_target_that_cannot_be_written_is_explained(models: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="While writing /proc/isomerge/out"):
        isomerge.merge([models["a"], models["b"]]).save("/proc/isomerge/out")


@pytest.mark.slow
def test_a_file_that_may_not_grow_leaves_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    """The kernel itself refuses the bytes, as a quota or a full disk does."""
    code = (
        "import resource, signal, sys, isomerge\n"
        "merged = isomerge.merge(sys.argv[1:3])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))\n"
        "try: merged.save(sys.argv[3])\n"
        "except isomerge.IsomergeError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(models["a"]), str(models["b"]), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "While writing" in done.stdout and "File too large" in done.stdout
    assert not (tmp_path / "out").exists()


def test_an_input_is_never_the_output(models: dict[str, Path]) -> None:
    before = (models["a"] / "model.safetensors").read_bytes()
    with pytest.raises(RequestError, match="inputs are never modified"):
        isomerge.merge([models["a"], models["b"]]).save(models["a"], force=True)
    assert (models["a"] / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_the_same_bytes_under_every_thread_count_and_hash_seed(models: dict[str, Path], tmp_path: Path) -> None:
    code = (
        "import json, sys, isomerge\n"
        "found = []\n"
        "for threads in (1, 2, 3):\n"
        "    for place, recipe in enumerate(json.loads(sys.argv[1])):\n"
        "        out = f'{sys.argv[2]}/{threads}-{place}'\n"
        "        written = isomerge.merge_recipe(recipe, threads=threads).save(out, shard_size='3MB')\n"
        "        found.append([place, written.sha256])\n"
        "print(json.dumps(found))\n"
    )
    recipes = json.dumps([recipe(models, method) for method in ("dare_ties", "ties", "della")])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, recipes, str(tmp_path / seed)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in "01234"
    ]
    found = set()
    for process in running:
        told, _ = process.communicate()
        assert process.returncode == 0
        found |= {(place, sha256) for place, sha256 in json.loads(told.splitlines()[-1])}
    assert len(found) == 3  # one result per recipe, whatever the threads and the seed
    first = {path.relative_to(tmp_path / "0"): path.read_bytes() for path in (tmp_path / "0").glob("*/model*")}
    for seed in "1234":
        assert {p.relative_to(tmp_path / seed): p.read_bytes() for p in (tmp_path / seed).glob("*/model*")} == first
