"""Windows and macOS lack much of what Linux has; merge, align and resume give the same bytes without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import isomerge
from models import fingerprint, model, noisy

pytestmark = pytest.mark.slow  # every test starts processes of its own


ELSEWHERE = Path(__file__).parent / "elsewhere.py"
SYSTEMS = ["windows", "macos"]


def run(system: str, *words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ELSEWHERE), system, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def weights(folder: Path) -> dict[str, str]:
    """What is the same at every time: not the record of how long it took."""
    return {k: v for k, v in fingerprint(folder).items() if k not in ("isomerge.json", "report.html")}


@pytest.fixture(scope="module")
def pair() -> list[Path]:
    return [model("llama"), model("llama", 1)]


@pytest.fixture(scope="module")
def here(pair: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this system writes."""
    place = tmp_path_factory.mktemp("linux")
    isomerge.merge([str(one) for one in pair]).save(place / "merge" / "out")
    isomerge.align(*pair).save(place / "align" / "out")
    return place


@pytest.mark.parametrize("verb", ["merge", pytest.param("align", marks=pytest.mark.slow)])
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_same_bytes_come_out(system: str, verb: str, pair: list[Path], here: Path, tmp_path: Path) -> None:
    out = tmp_path / verb / "out"
    done = run(system, verb, *pair, "-o", out, "--threads", 2, "--json")
    assert done.returncode == 0, done.stderr
    assert weights(out) == weights(here / verb / "out")
    assert json.loads(done.stdout)["out"] == str(out) and not (out / ".isomerge-partial").exists()


@pytest.mark.parametrize("system", ["windows", pytest.param("macos", marks=pytest.mark.slow)])
def test_a_killed_merge_goes_on(system: str, pair: list[Path], here: Path, tmp_path: Path) -> None:
    out = tmp_path / "merge" / "out"
    words = ["merge", *pair, "-o", out, "--threads", 2]
    killed = run(system, "--stop-after", 5, *words)
    assert killed.returncode == -signal.SIGKILL and not (out / "config.json").exists()
    journal = out / ".isomerge-partial" / "journal.jsonl"
    staged, noted = out / ".isomerge-partial" / "model.safetensors", journal.read_text().count('"tensor"')
    assert staged.is_file() and noted >= 5
    inode = staged.stat().st_ino
    done = run(system, *words)
    assert done.returncode == 0, done.stderr
    assert weights(out) == weights(here / "merge" / "out")
    assert (out / "model.safetensors").stat().st_ino == inode, "begun anew"


@pytest.mark.slow
def test_an_older_model_is_replaced_where_open_files_cannot_be(pair: list[Path], here: Path, tmp_path: Path) -> None:
    out = tmp_path / "merge" / "out"
    assert run("windows", "merge", pair[0], noisy(pair[0]), "-o", out).returncode == 0
    done = run("windows", "merge", *pair, "-o", out, "--force", "--threads", 2)
    assert done.returncode == 0, done.stderr
    assert weights(out) == weights(here / "merge" / "out")


@pytest.mark.slow
def test_two_writers_of_one_folder_do_not_meet_on_windows(pair: list[Path], tmp_path: Path) -> None:
    """The lock is on a file of the temporary folder, and another process holds it."""
    out = tmp_path / "out"
    hold = (
        "import sys, elsewhere; sys.argv[1] = 'windows'; elsewhere.become('windows'); from pathlib import Path\n"
        "from isomerge import system; folder = Path(sys.argv[2]); folder.mkdir(parents=True)\n"
        "system.lock_folder(folder); print('held', flush=True); sys.stdin.read()"
    )
    path = os.pathsep.join([str(ELSEWHERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, "windows", str(out / ".isomerge-partial")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    refused = run("windows", "merge", *pair, "-o", out)
    holder.communicate("")
    assert refused.returncode == 1 and "another process is writing into this folder" in refused.stderr
    assert run("windows", "merge", *pair, "-o", out).returncode == 0
