"""Runs: one at a time, with progress, and whatever happens to one of them the page goes on."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
from isomerge.errors import RequestError
from isomerge.studio.jobs import MOST_WAITING, Jobs
from models import tensors
from studio.conftest import Studio

# Does as it is told by its first word, as the command line would with --json.
PROGRAM = """
import json, signal, sys, time
word = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in the background of a shell
def line(done): print(json.dumps({"done": done, "total": 100, "what": "writing"}), file=sys.stderr, flush=True)
print("a library that complains", file=sys.stderr)
if word == "work":
    for done in (0, 50, 100): line(done)
    print(json.dumps({"out": sys.argv[2]}))
elif word == "fail":
    print(json.dumps({"error": "This cannot be merged. Name other models."})); sys.exit(2)
elif word == "crash":
    print("Segmentation fault", file=sys.stderr, flush=True); sys.exit(139)
else:
    try: line(10); time.sleep(600)
    except KeyboardInterrupt:
        if word == "stubborn": time.sleep(600)
        print(json.dumps({"error": "Interrupted; the same command continues."})); sys.exit(130)
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path, program=(sys.executable, "-c", PROGRAM))
    yield made
    made.close()


def waited(jobs: Jobs, holds: Callable[[dict[str, Any]], bool], number: int) -> dict[str, Any]:
    """The record of a run, once something holds of it."""
    end = time.monotonic() + 300  # long: the machine may be busy
    while time.monotonic() < end:
        (found,) = [one for one in jobs.records() if one["number"] == number]
        if holds(found):
            return found
        time.sleep(0.01)
    raise AssertionError(found)


def ended(jobs: Jobs, number: int) -> dict[str, Any]:
    return waited(jobs, lambda job: job["state"] not in ("waiting", "running"), number)


def test_a_run_that_ends_well_has_its_record_and_its_progress(jobs: Jobs) -> None:
    done = ended(jobs, jobs.add(["work", "a b"], "out").number)
    assert done["state"] == "done" and done["result"] == {"out": "a b"} and done["command"] == "isomerge work 'a b'"
    assert done["progress"]["done"] == done["progress"]["total"] == 100 and done["progress"]["what"] == "writing"
    assert done["seconds"] > 0 and done["error"] is None


def test_a_run_that_fails_has_the_paragraph_of_the_command_line(jobs: Jobs) -> None:
    failed = ended(jobs, jobs.add(["fail"]).number)
    assert (failed["state"], failed["error"]) == ("failed", "This cannot be merged. Name other models.")


def test_a_run_that_crashes_leaves_the_queue_alone(jobs: Jobs) -> None:
    first, second = jobs.add(["crash"]), jobs.add(["work", "x"])
    assert ended(jobs, first.number)["error"] == "Segmentation fault"
    assert ended(jobs, second.number)["state"] == "done"


def test_runs_wait_for_each_other_and_either_can_be_cancelled(jobs: Jobs) -> None:
    first, second, third = jobs.add(["sleep"], "one"), jobs.add(["sleep"], "two"), jobs.add(["work", "x"], "three")
    waited(jobs, lambda job: job["progress"] is not None, first.number)
    assert [one["state"] for one in jobs.records()] == ["waiting", "waiting", "running"]
    jobs.cancel(second.number)
    jobs.cancel(first.number)
    stopped = ended(jobs, first.number)
    assert stopped["state"] == "cancelled" and stopped["error"] == "Interrupted; the same command continues."
    assert ended(jobs, second.number)["state"] == "cancelled" and ended(jobs, third.number)["state"] == "done"
    jobs.cancel(third.number)  # too late, and no harm
    assert ended(jobs, third.number)["state"] == "done"


def test_what_does_not_stop_when_asked_is_ended(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isomerge.studio.jobs.PATIENCE", 0.2)
    job = jobs.add(["stubborn"])
    waited(jobs, lambda one: one["progress"] is not None, job.number)
    jobs.cancel(job.number)
    assert ended(jobs, job.number)["state"] == "cancelled"


def test_two_runs_into_one_folder_and_too_many_runs_are_refused(jobs: Jobs) -> None:
    first = jobs.add(["sleep"], "out")
    waited(jobs, lambda job: job["state"] == "running", first.number)
    with pytest.raises(RequestError, match="writes out is not over"):
        jobs.add(["work", "x"], "out")
    for number in range(MOST_WAITING):
        jobs.add(["work", "x"], f"out-{number}")
    with pytest.raises(RequestError, match="waiting already"):
        jobs.add(["work", "x"], "one more")
    with pytest.raises(RequestError, match="no run 99"):
        jobs.cancel(99)


def test_closing_stops_what_runs_and_names_it(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, program=(sys.executable, "-c", PROGRAM))
    first, second = jobs.add(["sleep"], "one"), jobs.add(["work", "x"], "two")
    waited(jobs, lambda job: job["progress"] is not None, first.number)
    assert jobs.close() == "isomerge sleep"
    assert ended(jobs, first.number)["state"] == ended(jobs, second.number)["state"] == "cancelled"


# --- with isomerge itself ---------------------------------------------------------------------------------------------
TEXT = "merge_method: linear\nmodels:\n- model: a\n- model: b\n"


@pytest.mark.slow
def test_a_merge_of_the_page_is_the_mean_and_a_stopped_one_goes_on_where_it_was(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins on the command line and is killed there, as a server may be that is killed with its run."""
    from typer.testing import CliRunner

    from isomerge.cli.app import app
    from isomerge.merging.run.jobs import Job

    done = ended(studio.jobs, studio.post("merge", text=TEXT, out="merged")["job"])
    assert done["state"] == "done" and done["result"]["verified"] is True, done
    a, b, merged = (tensors(studio.folder / name) for name in ("a", "b", "merged"))
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor.double(), (a[name].double() + b[name].double()) / 2, rtol=1e-6, atol=1e-7)

    pieces, made = Job.pieces, []

    def stopping(job: Job) -> Any:
        made.append(job)
        if len(made) == 10:
            raise KeyboardInterrupt
        yield from pieces(job)

    (studio.folder / "second.yml").write_text(TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "pieces", stopping)
        CliRunner().invoke(app, ["merge", "second.yml", "-o", "second", "--threads", "1"])
    (left,) = [one for one in studio.get("listing")["outputs"] if one["path"] == "second"]
    assert left["kind"] == "unfinished" and left["recipe"] == "second.yml"
    journal = studio.folder / "second" / ".isomerge-partial" / "journal.jsonl"
    kept = len(journal.read_text().splitlines()) - 1
    done = ended(studio.jobs, studio.post("again", out="second")["job"])
    assert kept >= 8 and done["state"] == "done" and not journal.exists()
    first = (studio.folder / "merged" / "model.safetensors").read_bytes()
    assert (studio.folder / "second" / "model.safetensors").read_bytes() == first
    (report,) = [one["report"] for one in studio.get("listing")["outputs"] if one["path"] == "second"]
    assert "isomerge report" in studio.client.get(report).text


@pytest.mark.slow
def test_a_check_on_data_is_a_run_that_ends_with_measured_merges(studio: Studio) -> None:
    from browser.studio_page import make_models

    make_models(studio.folder)
    answer = studio.post("check", models=["tuned-for-code", "tuned-for-prose"], data="texts.txt")
    assert answer["command"] == "isomerge check tuned-for-code tuned-for-prose --data texts.txt"
    done = ended(studio.jobs, answer["job"])
    assert done["result"]["verdict"] == "siblings" and done["result"]["mergeability"]["measured"], done


@pytest.mark.slow
def test_a_merge_that_cannot_be_is_told_in_the_words_of_the_command_line(studio: Studio) -> None:
    shutil.rmtree(studio.folder / "b")
    failed = ended(studio.jobs, studio.post("merge", text=TEXT, out="merged")["job"])
    assert failed["state"] == "failed" and "no such" in failed["error"] and not (studio.folder / "merged").exists()


def test_the_library_is_what_the_page_calls(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the library is its paragraph on the page."""

    def failing(*_: Any, **__: Any) -> None:
        raise RequestError("These cannot be compared. Name others.")

    monkeypatch.setattr(isomerge, "check", failing)
    assert studio.refused("check", models=["a", "b"]) == "These cannot be compared. Name others."
