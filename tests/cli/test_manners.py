"""Manners every verb has: JSON, an example, completion, no colours where none are wanted, words on interruption."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file

from isomerge.cli.app import app

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
COLOUR = re.compile(r"\x1b\[[\d;]*(3[0-8]|4[0-8]|9[0-7])[\d;]*m")


def isomerge(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, as a shell starts it."""
    return subprocess.run(
        [sys.executable, "-m", "isomerge", *arguments], env={**os.environ, **environment}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def on_a_terminal(code: str, **environment: str) -> str:
    """All that a Python program shows on a terminal."""
    primary, secondary = pty.openpty()
    settings = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", **environment}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=secondary, stderr=secondary, env=settings)
    os.close(secondary)
    shown = b""
    while True:
        try:
            part = os.read(primary, 65536)
        except OSError:  # the other side was closed
            break
        if not part:
            break
        shown += part
    os.close(primary)
    assert process.wait() == 0, shown
    return shown.decode()


@pytest.mark.parametrize("verb", sorted(COMMANDS))
def test_every_verb_has_an_example_and_the_shared_flags(run: Any, verb: str) -> None:
    shown = run(f"{verb} --help")
    assert shown.exit_code == 0 and re.search(rf"Example: isomerge {verb}\b", shown.stdout)
    flags = {flag for parameter in COMMANDS[verb].params for flag in parameter.opts}
    assert {"--json", "--quiet", "-q", "--debug"} <= flags


@pytest.mark.parametrize("verb", sorted(COMMANDS))
def test_every_verb_tells_a_mistake_as_one_json_object(run: Any, verb: str) -> None:
    done = run(f"{verb} --json --no-such-flag-at-all x y -o out")
    assert done.exit_code == 2
    assert set(json.loads(done.stdout)) == {"error", "kind", "exit_code"}
    assert len(done.stdout.strip().splitlines()) == 1 and "Traceback" not in done.stderr


def test_no_help_imports_anything_heavy() -> None:
    """In one fresh process for all verbs: importing torch would make each of them wait two seconds."""
    code = (
        "import sys\nfrom isomerge.cli.app import app\nfrom typer.testing import CliRunner\n"
        f"for verb in {[*sorted(COMMANDS), '']!r}:\n"
        "    assert CliRunner().invoke(app, [*verb.split(), '--help']).exit_code == 0, verb\n"
        "print(*sorted({'torch', 'transformers', 'scipy', 'huggingface_hub', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# --- completion -------------------------------------------------------------------------------------------------------
def completed(words: str) -> list[str]:
    environment = {
        "_ISOMERGE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    return isomerge(**environment).stdout.split()


def test_a_shell_completes_verbs_and_flags() -> None:
    assert completed("isomerge ch") == ["check"]
    assert completed("isomerge check --expl") == ["--explain"]


def test_a_shell_completes_words_that_are_known() -> None:
    assert completed("isomerge merge --method ti") == ["ties"]
    assert completed("isomerge sweep --method greedy") == ["greedy_soup"]
    assert completed("isomerge sweep --mode t") == ["together"]
    assert completed("isomerge eval --task ca") == ["causal-lm"]
    assert completed("isomerge eval --kind do") == ["documents"]
    assert completed("isomerge align --level p") == ["permutation"]


def test_words_for_a_shell_are_those_the_library_knows() -> None:
    from isomerge.cli import eval as evaluation
    from isomerge.cli.completion import method_names
    from isomerge.data.heads import TASKS
    from isomerge.data.open import KINDS
    from isomerge.merge.whole import EVERY

    assert evaluation.TASKS == TASKS and evaluation.KINDS == KINDS
    assert method_names() == {name: method.summary for name, method in sorted(EVERY.items())}


def test_methods_are_completed_without_anything_heavy() -> None:
    code = (
        "import sys\nfrom isomerge.cli.completion import complete_method\n"
        "print(*(name for name, summary in complete_method('dare') if summary))\n"
        "print(*sorted({'torch', 'numpy', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["dare_linear dare_ties", ""]


def test_the_script_for_a_shell_is_printed() -> None:
    done = isomerge(_ISOMERGE_COMPLETE="source_bash")
    assert done.returncode == 0 and "complete -o default -F _isomerge_completion isomerge" in done.stdout
    assert "--install-completion" in isomerge("--help").stdout


# --- terminals and pipes ----------------------------------------------------------------------------------------------
LIST = "import sys; sys.argv = ['isomerge', 'list', 'architectures']\nfrom isomerge.cli import main\nmain()"
BAR = (
    "import time\nfrom isomerge.cli.progress import bar\n"
    "with bar('bytes') as progress:\n"
    "    for done in range(6):\n"
    "        progress(done * 10**9, 6 * 10**9, 'merging')\n"
    "        time.sleep(0.15)\n"
)


def test_nothing_but_text_goes_into_a_pipe() -> None:
    done = isomerge("list", "architectures", TERM="xterm-256color")
    assert done.returncode == 0 and "\x1b" not in done.stdout and done.stderr == ""


def test_no_color_is_obeyed_on_a_terminal() -> None:
    assert not COLOUR.search(on_a_terminal(LIST + "", NO_COLOR="1"))
    assert COLOUR.search(on_a_terminal(BAR)) and not COLOUR.search(on_a_terminal(BAR, NO_COLOR="1"))


def test_the_bar_shows_what_is_done_bytes_and_the_time_left() -> None:
    shown = on_a_terminal(BAR)
    assert "merging" in shown and re.search(r"\d\.\d/6\.0 GB", shown)
    assert re.search(r"0:00:0\d", shown)


def test_what_a_sweep_says_while_the_bar_is_shown_has_a_line_of_its_own() -> None:
    shown = on_a_terminal(
        "import time\nfrom isomerge.cli.progress import bar\nfrom isomerge.cli.sweep import _announced\n"
        "with bar('both') as progress:\n"
        "    report = _announced('3 points of t', progress)\n"
        "    time.sleep(0.3)\n"
        "    report(0, 3, 'measuring')\n"
        "    time.sleep(0.3)\n"
    )
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown))
    assert "3 points of t" in lines


def test_a_reader_that_goes_away_is_no_error() -> None:
    program = f"{shlex.quote(sys.executable)} -m isomerge list methods --json"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {program} | true"], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------
def write_model(folder: Path, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    folder.mkdir()
    state = {f"layers.{k}.weight": torch.randn(8, 8, generator=random) for k in range(30)}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard-of", "num_hidden_layers": 30}))


def test_ctrl_c_names_what_is_left_and_the_command_that_goes_on(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_model(tmp_path / name, seed)
    command = ["merge", "a", "b", "-o", "my out", "--threads", "1", "--no-verify", "--json"]
    slow = (
        "import time, sys, isomerge.merge.pipeline as p; old = p.Job.pieces\n"
        "def pieces(self):\n    time.sleep(0.2)\n    yield from old(self)\n"
        f"p.Job.pieces = pieces; sys.argv = ['isomerge', *{command!r}]\nfrom isomerge.cli import main\nmain()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    partial = tmp_path / "my out" / ".isomerge-partial"
    deadline = time.monotonic() + 60
    while not ((partial / "journal.jsonl").exists() and len((partial / "journal.jsonl").read_text().splitlines()) > 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    answer, told = process.communicate(timeout=60)
    assert process.returncode == 130 and json.loads(answer)["exit_code"] == 130
    assert len(told.strip().splitlines()) == 1 and "Traceback" not in told
    assert "my out/.isomerge-partial" in told and "the inputs were not changed" in told
    resume = shlex.split(told.strip().rpartition("goes on from there: ")[2])
    assert resume == ["isomerge", *command]
    done = subprocess.run([sys.executable, "-m", *resume], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensors"] == 30 and not partial.exists()
