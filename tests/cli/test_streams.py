"""Finished work never fails for what stdout and stderr are: an encoding without a character, a reader that went away, a
stream that was never opened. Real processes: what Python does with its streams when it starts and ends is part."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models import bert, fingerprint, noisy
from samples import SENTENCES

pytestmark = pytest.mark.slow  # every test starts processes of its own


HERE = Path(__file__).parent
MODELS = ["α–first", "second"]  # a letter and a dash that latin-1 and cp1252 do not share


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("streams")
    bert(place / MODELS[0], "sequence", labels=["bad", "good"])
    shutil.copytree(noisy(place / MODELS[0]), place / MODELS[1])
    rows = [json.dumps({"text": text, "label": number % 2}) for number, text in enumerate(SENTENCES)]
    (place / "data.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return place


def lines(out: str) -> list[list[str]]:
    """Every verb on the two models but the demo, which takes half a minute."""
    data = ["--data", "data.jsonl"]
    return [
        ["--help"],
        ["merge", "--help"],
        ["list", "methods"],
        ["check", *MODELS],
        ["plan", *MODELS],
        ["merge", *MODELS, "-o", f"{out}/merged"],
        ["verify", f"{out}/merged"],
        ["reproduce", f"{out}/merged"],
        ["report", f"{out}/merged"],
        ["align", *MODELS, "-o", f"{out}/aligned"],
        ["extract", MODELS[1], MODELS[0], "--rank", "2", "-o", f"{out}/adapter"],
        ["eval", MODELS[0], *data],
        ["ensemble", *MODELS, *data],
        ["barrier", *MODELS, *data, "--points", "3"],
        ["curve", *MODELS, *data, "--points", "3", "--steps", "2", "--point", "0.5", "-o", f"{out}/point"],
        ["sweep", *MODELS, *data, "--over", "weight=0.2,0.8"],
        ["search", *MODELS, *data, "--over", "weight=0.2:1", "--evaluations", "3", "--algorithm", "random"],
        ["calibrate", MODELS[0], *data, "-o", f"{out}/statistics.safetensors"],
        ["selftest", MODELS[0]],
        ["merge", MODELS[0], "no–such–model", "-o", f"{out}/none"],
    ]


def environment(**changed: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONIO"))}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **changed}


def run_all(folder: Path, out: str, start: Callable[[list[str]], list[str]], **options: Any) -> tuple[Any, list[Any]]:
    """All lines in one process; what it printed and the exit code of each."""
    shutil.rmtree(folder / out, ignore_errors=True)
    (folder / out).mkdir()
    codes = folder / out / "codes"
    command = start([sys.executable, str(HERE / "verbs_in_turn.py"), str(codes)])
    given = "".join(json.dumps(line) + "\n" for line in lines(out))
    done = subprocess.run(command, cwd=folder, input=given.encode(), capture_output=True, timeout=300, **options)
    return done, [json.loads(line) for line in codes.read_text(encoding="utf-8").splitlines()]


def expected(out: str) -> list[list[Any]]:
    return [[line[0], 2 if "no–such–model" in line else 0] for line in lines(out)]


@pytest.fixture(scope="module")
def usual(folder: Path) -> tuple[str, dict[str, str]]:
    """What the verbs print and write in UTF-8."""
    done, codes = run_all(folder, "usual", list, env=environment(PYTHONIOENCODING="utf-8"))
    assert codes == expected("usual"), done.stderr.decode()
    return done.stdout.decode("utf-8"), written(folder / "usual")


def written(out: Path) -> dict[str, str]:
    """All that does not depend on the moment."""
    every = fingerprint(out / "merged") | {f"aligned {k}": v for k, v in fingerprint(out / "aligned").items()}
    return {name: sha256 for name, sha256 in every.items() if not name.endswith(("isomerge.json", "report.html"))}


POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENCODINGS = [
    pytest.param({"PYTHONIOENCODING": "latin-1"}, id="latin-1"),
    pytest.param({"PYTHONIOENCODING": "cp1252"}, id="cp1252", marks=pytest.mark.slow),
    pytest.param({"PYTHONIOENCODING": "cp437"}, id="cp437", marks=pytest.mark.slow),
    pytest.param({"LC_ALL": "POSIX"}, id="POSIX", marks=pytest.mark.slow),
    pytest.param({"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"}, id="ascii", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_verb_fails_for_an_encoding(
    folder: Path, usual: tuple[str, dict[str, str]], encoding: dict[str, str]
) -> None:
    text, files = usual
    assert "→" in text  # which the encodings lack
    done, codes = run_all(folder, "other", list, env=environment(**encoding))
    assert codes == expected("other"), done.stderr.decode("latin-1")
    assert b"defect" not in done.stderr
    shown = done.stdout.decode("latin-1")
    assert shown.count("Weighted average") == text.count("Weighted average") >= 1
    assert written(folder / "other") == files


def test_names_that_are_no_text_in_a_locale_are_refused_before_any_work(folder: Path) -> None:
    """They cannot be written into a lock file, and transformers cannot open them."""
    done = subprocess.run(
        [sys.executable, "-m", "isomerge", "merge", *MODELS, "-o", "refused"],
        cwd=folder, env=environment(**POSIX), capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2 and not (folder / "refused").exists()
    assert b"has bytes that are no text in ascii" in done.stderr and b"LC_ALL=C.UTF-8" in done.stderr


def test_characters_that_an_encoding_lacks_are_written_in_ascii(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "isomerge", "check", *MODELS],
        cwd=folder, env=environment(PYTHONIOENCODING="ascii"), capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and b"\\u03b1-first" in done.stdout and b"?" not in done.stdout


def test_no_verb_fails_for_a_closed_stdout(folder: Path, usual: tuple[str, dict[str, str]]) -> None:
    """As `>&-` starts it: file number 1 is free, and would be the next file that is opened."""
    done, codes = run_all(folder, "shut", lambda words: ["sh", "-c", 'exec "$@" >&-', "sh", *words], env=environment())
    assert codes == expected("shut"), done.stderr.decode()
    assert written(folder / "shut") == usual[1]


def test_no_verb_fails_for_a_reader_that_went_away(folder: Path, usual: tuple[str, dict[str, str]]) -> None:
    """As in `| head -1`, with the reader gone before the first line; stderr too."""
    gone = 'mkfifo "$0.fifo"; (exec 3<"$0.fifo") & exec 9>"$0.fifo"; wait; rm "$0.fifo"; exec "$@" >&9 2>&9'
    done, codes = run_all(folder, "gone", lambda words: ["bash", "-c", gone, words[-1], *words], env=environment())
    assert codes == expected("gone"), done.stderr.decode()
    assert done.returncode == 0 and done.stdout == b"" and written(folder / "gone") == usual[1]


def test_a_result_that_finds_no_room_is_reported(folder: Path) -> None:
    """Unlike a closed pipe: who redirects into a file wants to have it."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "isomerge", "list", "methods"],
            cwd=folder, env=environment(), stdout=full, stderr=subprocess.PIPE, timeout=300,
        )  # fmt: skip
    told = done.stderr.decode()
    assert (
        done.returncode == 1
        and "its output was not printed: No space left on device" in told
        and "Traceback" not in told
    )
    assert len(told.strip().splitlines()) == 1
