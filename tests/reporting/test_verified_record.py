"""After `isomerge verify` the record and the page tell what it found; the lock, the weights and the curves stay."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reporting.outputs import made, page_of, record_of, said, verb
from reporting.test_page import CURVE


def hashes(folder: Path) -> dict[str, str]:
    files = [path for path in folder.iterdir() if path.name not in ("isomerge.json", "report.html")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    shutil.copytree(made("ties"), tmp_path / "out")
    return tmp_path / "out"


def shown(folder: Path) -> dict[str, list[str]]:
    (caption,) = [caption for caption in page_of(folder).tables if caption.startswith("Asked ")]
    return {"caption": [caption], **{row[0]: row[1:] for row in page_of(folder).tables[caption][1:]}}


def test_the_record_and_the_page_tell_the_new_answers(out: Path) -> None:
    before, other = hashes(out), {k: v for k, v in record_of(out).items() if k != "run"}
    assert shown(out)["finite"][0] == "not asked"
    told = said("verify", out)
    assert told["report"] == str(out / "report.html") and told["notes"] == []
    run = record_of(out)["run"]
    assert run["checks"] == told["checks"] and run["verified"]["deep"] is True
    assert run["seconds"] == record_of(made("ties"))["run"]["seconds"], "what the merge took is still told"
    rows = shown(out)
    assert (
        rows["caption"][0].startswith("Asked by isomerge verify on 20")
        and "every weight was read" in rows["caption"][0]
    )
    assert rows["finite"][0] == rows["lock"][0] == "yes"
    assert page_of(out).record["record"] == record_of(out)
    assert hashes(out) == before and {k: v for k, v in record_of(out).items() if k != "run"} == other
    assert said("verify", out)["verdict"] == "good", "the lock holds none of it"


def test_what_is_wrong_later_is_on_the_page_later(out: Path) -> None:
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x11")
    assert verb("verify", out).exit_code == 1
    assert shown(out)["lock"][0] == "NO" and "failed" in page_of(out).words
    verb("verify", out, "--quick")
    assert shown(out)["lock"][0] == "not asked" and "headers and side files only" in shown(out)["caption"][0]


def test_the_curves_of_the_page_stay(out: Path, tmp_path: Path) -> None:
    (tmp_path / "curve.json").write_text(json.dumps(CURVE))
    said("report", out, "--measured", tmp_path / "curve.json")
    said("verify", out, "--quick")
    assert page_of(out).record["measurements"] == [CURVE]


def test_without_a_page_or_a_record_none_is_made(out: Path) -> None:
    (out / "report.html").unlink()
    assert said("verify", out)["report"] is None
    assert record_of(out)["run"]["verified"]["deep"] is True and not (out / "report.html").exists()
    (out / "isomerge.json").unlink()
    assert said("verify", out)["report"] is None
    assert not (out / "isomerge.json").exists()


def test_a_broken_record_changes_no_verdict(out: Path) -> None:
    (out / "isomerge.json").write_text("{")
    told = said("verify", out)
    assert told["verdict"] == "good" and "cut off or not JSON" in told["notes"][0]
    assert "not updated" in verb("verify", out).stdout


def test_without_jinja2_the_record_is_brought_up_to_date(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert said("verify", out)["report"] is None
    assert record_of(out)["run"]["verified"]["deep"] is True


def test_the_output_of_an_alignment_too(tmp_path: Path) -> None:
    shutil.copytree(made("align"), tmp_path / "out")
    said("verify", tmp_path / "out")
    assert shown(tmp_path / "out")["finite"][0] == "yes"


def test_a_page_of_somebody_else_stays(out: Path) -> None:
    (out / "report.html").write_bytes("<html>caf\u00e9</html>".encode("latin-1"))
    told = said("verify", out, "--quick")
    assert told["verdict"] == "good" and told["report"] is None and told["notes"] == []
    assert (out / "report.html").read_bytes() == b"<html>caf\xe9</html>"
    assert record_of(out)["run"]["checks"] == told["checks"]


def test_links_stay_links(out: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache"
    (out / "isomerge.json").rename(kept)
    (out / "isomerge.json").symlink_to(kept)
    before = kept.read_bytes()
    assert said("verify", out, "--quick")["report"] is None
    assert (out / "isomerge.json").is_symlink() and kept.read_bytes() == before


@pytest.mark.parametrize("trouble", ["full disk", "strange record"])
def test_an_answer_is_never_lost(trouble: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if trouble == "full disk":

        def refuse(path: Path, text: str) -> None:
            raise OSError(28, "No space left on device", str(path))

        monkeypatch.setattr("isomerge.reporting.page.write_text", refuse)
    else:
        (out / "isomerge.json").write_text('{"format": 1, "kind": "merge", "run": 5}')
    told = said("verify", out, "--quick")
    assert told["verdict"] == "good" and "the report was not updated" in told["notes"][0]


@pytest.mark.slow
def test_writers_at_once_do_not_meet(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from isomerge.reporting.record import write_text\n"
        "for _ in range(300): write_text(Path(sys.argv[1]), sys.argv[2] * 20_000)"
    )
    path = tmp_path / "isomerge.json"
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), letter]) for letter in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    text = path.read_text()
    assert len(text) == 20_000 and len(set(text)) == 1
    assert list(tmp_path.iterdir()) == [path]
