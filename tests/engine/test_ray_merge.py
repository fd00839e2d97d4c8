"""A merge on a cluster writes the bytes of the same merge in threads, whatever dies on the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
from commands import hear_ctrl_c
from isomerge.checkpoint import TensorInfo, write_checkpoint
from isomerge.checkpoint.staging import STAGING
from isomerge.errors import CheckpointError, RequestError

pytestmark = pytest.mark.slow
SHAPE, COUNT = (384, 512), 48


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base and two models of twenty megabytes: enough units to be killed between two of them."""
    folder = tmp_path_factory.mktemp("models")
    plan = {f"model.layers.{i}.mlp.weight": TensorInfo(SHAPE, torch.bfloat16) for i in range(COUNT)}
    for seed, name in enumerate(["base", "a", "b"]):
        generator = torch.Generator().manual_seed(seed)
        stream = ((n, torch.randn(SHAPE, generator=generator).bfloat16()) for n in plan)
        write_checkpoint(folder / name, plan, stream, config={"num_hidden_layers": COUNT, "from": name})
    return [folder / name for name in ("base", "a", "b")]


def merged(models: list[Path], method: str = "della", **options: Any) -> isomerge.Merged:
    base, *others = models
    return isomerge.merge(others, method=method, base=base, **options)


def content(folder: Path) -> dict[str, bytes]:
    """Every file, whatever the folder is called."""
    return {p.name: p.read_bytes().replace(folder.name.encode(), b"OUT") for p in folder.iterdir()}


@pytest.fixture(scope="module")
def expected(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected") / "in-threads"
    merged(models).save(out, shard_size="5MB")
    return content(out)


def lines_of(out: Path) -> int:
    try:
        return (out / STAGING / "journal.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def wait_for_lines(out: Path, count: int, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while lines_of(out) < count:
        assert time.monotonic() < end, "the merge did not get that far"
        time.sleep(0.005)


def test_every_file_of_a_merge_is_that_of_the_threads(
    cluster, models: list[Path], expected: dict[str, bytes], tmp_path: Path
) -> None:
    merged(models, engine="ray").save(tmp_path / "on-ray", shard_size="5MB")
    assert content(tmp_path / "on-ray") == expected


def test_a_worker_killed_in_the_middle_is_replaced(
    cluster, models: list[Path], expected: dict[str, bytes], tmp_path: Path
) -> None:
    out, killed = tmp_path / "on-ray", []

    def kill() -> None:
        wait_for_lines(out, 5)
        while not killed and lines_of(out) < COUNT:
            for pid in cluster.busy()[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    merged(models, engine="ray").save(out, shard_size="5MB")
    killer.join()
    assert killed, "the merge was over before a worker could be killed"
    assert content(out) == expected


DRIVER = """
import sys
import isomerge
base, a, b, out, address = sys.argv[1:]
merged = isomerge.merge([a, b], method="della", base=base, engine="ray", address=address)
merged.save(out, shard_size="5MB")
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_ends_in_the_middle_resumes(
    cluster, models: list[Path], expected: dict[str, bytes], tmp_path: Path, end: signal.Signals
) -> None:
    out = tmp_path / "on-ray"
    for _ in range(5):
        shutil.rmtree(out, ignore_errors=True)
        address = "127.0.0.1:" + cluster.address.rpartition(":")[2]  # not as Ray itself calls the machine
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, *map(str, models), str(out), address],
                                  stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c)  # fmt: skip
        wait_for_lines(out, 5)
        driver.send_signal(end)
        _, told = driver.communicate(timeout=120)
        if driver.returncode != 0:
            break
    assert driver.returncode == -end or (end == signal.SIGINT and "KeyboardInterrupt" in told), told
    assert not (out / "config.json").exists()
    kept = lines_of(out) - 1
    assert 4 <= kept < COUNT
    merged(models, engine="ray").save(out, shard_size="5MB")
    assert content(out) == expected


def test_a_budget_that_no_worker_can_keep_is_refused_before_anything_is_written(
    cluster, models: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="Merging within max_memory 1MB"):
        merged(models, engine="ray", max_memory="1MB").save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_error_of_a_worker_is_the_error_of_the_threads(cluster, models: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    plan = {f"model.layers.{i}.mlp.weight": TensorInfo(SHAPE, torch.bfloat16) for i in range(COUNT)}
    stream = ((name, torch.full(SHAPE, torch.nan if "7" in name else 1.0).bfloat16()) for name in plan)
    write_checkpoint(bad, plan, stream, config={"num_hidden_layers": COUNT, "from": "bad"})
    texts = []
    for engine in ("threads", "ray"):
        with pytest.raises(CheckpointError, match=r"model\.layers\.\d*7\d*\.mlp\.weight.*bad") as caught:
            isomerge.merge([models[1], bad], engine=engine, threads=1).save(tmp_path / "out")
        texts.append(str(caught.value))
        assert not (tmp_path / "out").exists(), "a failed merge leaves nothing"
    assert texts[0] == texts[1]
