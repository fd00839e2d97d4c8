"""An alignment on a cluster is that of the threads, file by file, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import isomerge
import models as tiny
from isomerge.checkpoint.staging import STAGING
from isomerge.errors import RequestError

pytestmark = pytest.mark.slow


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes().replace(folder.name.encode(), b"OUT") for p in folder.iterdir()}


def save_larger(folder: Path, seed: int) -> Path:
    """Many layers: enough units for something to be killed between two of them."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=160, vocab_size=97, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("strangers")
    return [save_larger(folder / name, seed) for seed, name in enumerate(["a", "b"])]


@pytest.fixture(scope="module")
def expected(strangers: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected") / "in-threads"
    isomerge.align(strangers[1], strangers[0]).save(out, shard_size="1MB")
    return content(out)


@pytest.mark.parametrize("family", ["llama", "bert", "vit", "mixtral"])
@pytest.mark.parametrize("level", ["full", "permutation"])
def test_every_file_of_an_alignment_is_that_of_the_threads(cluster, family: str, level: str, tmp_path: Path) -> None:
    a, b = (tiny.model(family, seed) for seed in (0, 1))
    for engine in ("threads", "ray"):
        isomerge.align(b, a, level=level, engine=engine).save(tmp_path / engine, anchor_out=tmp_path / f"{engine}-a")
    for suffix in ("", "-a"):
        assert content(tmp_path / f"ray{suffix}") == content(tmp_path / f"threads{suffix}")


def test_a_merge_that_aligns_is_that_of_the_threads(cluster, strangers: list[Path], tmp_path: Path) -> None:
    for engine in ("threads", "ray"):
        isomerge.merge(strangers, align=True, engine=engine).save(tmp_path / engine)
    assert content(tmp_path / "ray") == content(tmp_path / "threads")


def test_a_worker_killed_while_units_are_solved_is_replaced(
    cluster, strangers: list[Path], expected: dict[str, bytes], tmp_path: Path
) -> None:
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while len(killed) < 2 and not over.is_set():
            for pid in cluster.busy()[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                time.sleep(1)

    killer = threading.Thread(target=kill)
    killer.start()
    alignment = isomerge.align(strangers[1], strangers[0], engine="ray")
    over.set()
    killer.join()
    alignment.save(tmp_path / "on-ray", shard_size="1MB")
    assert killed
    assert content(tmp_path / "on-ray") == expected


DRIVER = """
import sys
import isomerge
a, b, out, address = sys.argv[1:]
isomerge.align(b, a, engine="ray", address=address, resume=out).save(out, shard_size="1MB")
"""


@pytest.mark.parametrize("moment", ["solving", "writing"])
def test_a_driver_killed_in_the_middle_resumes(
    cluster, strangers: list[Path], expected: dict[str, bytes], tmp_path: Path, moment: str
) -> None:
    out = tmp_path / "on-ray"
    command = [sys.executable, "-c", DRIVER, *map(str, strangers), str(out), cluster.address]
    for _ in range(8):
        driver = subprocess.Popen(command)
        end = time.monotonic() + 180
        journal = out / STAGING / "journal.jsonl"
        while driver.poll() is None and time.monotonic() < end:
            if cluster.busy() if moment == "solving" else journal.exists() and journal.read_bytes().count(b"\n") > 5:
                break
            time.sleep(0.005)
        driver.send_signal(signal.SIGKILL)
        if driver.wait(timeout=60) == -signal.SIGKILL:
            break
    assert driver.returncode == -signal.SIGKILL
    assert not (out / "config.json").exists()
    solved = list((out / STAGING / ".solved").glob("*"))
    assert bool(solved) == (moment == "writing"), "what was solved is kept before the first tensor is written"
    isomerge.align(strangers[1], strangers[0], engine="ray", resume=out).save(out, shard_size="1MB")
    assert content(out) == expected


def test_what_only_this_process_has_is_refused(cluster, strangers: list[Path]) -> None:
    state = load_file(strangers[0] / "model.safetensors")
    with pytest.raises(RequestError, match="in the memory of this process.*Leave engine out"):
        isomerge.merge([state, strangers[1]], engine="ray")
    with pytest.raises(RequestError, match="common mean.*Leave engine out"):
        isomerge.align_family(strangers, many="universe", engine="ray")
