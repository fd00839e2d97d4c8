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
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file

from commands import hear_ctrl_c
from isomerge.cli.app import app

ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
MERGEKIT = {"mergekit-yaml", "mergekit-multi", "mergekit-moe", "mergekit-tokensurgeon", "mergekit-extract-lora"}
COLOUR = re.compile(r"\x1b\[[\d;]*(3[0-8]|4[0-8]|9[0-7])[\d;]*m")


def isomerge(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, as a shell starts it."""
    return subprocess.run(
        [sys.executable, "-m", "isomerge", *arguments], env={**os.environ, **environment}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


@cache
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
    assert shown.exit_code == 0
    # On the last line, and so on one line: an example is there to be copied.
    assert re.match(rf" *Example: isomerge {verb}\b", shown.stdout.rstrip().splitlines()[-1])
    flags = {flag for parameter in COMMANDS[verb].params for flag in parameter.opts}
    assert {"--json", "--quiet", "-q", "--debug"} <= flags
    needed = any(parameter.required for parameter in COMMANDS[verb].params)
    assert "\\[" not in shown.stdout and ("[required]" in shown.stdout) is needed


def test_every_verb_is_told_whole_on_a_line_of_its_own(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("--help").stdout.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(COMMANDS.keys() - MERGEKIT)
    assert all(line.endswith(".") and not line.endswith("...") and len(line) <= 80 for line in lines)


def test_the_version_is_known_without_an_installed_package(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    shown = run("--version")
    assert shown.exit_code == 0 and re.fullmatch(r"isomerge \d+\.\d+\.\d+\S*\n", shown.stdout)


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


@pytest.mark.slow
def test_a_shell_completes_words_that_are_known() -> None:
    assert completed("isomerge merge --method ti") == ["ties"]
    assert completed("isomerge sweep --method greedy") == ["greedy_soup"]
    assert completed("isomerge sweep --mode t") == ["together"]
    assert completed("isomerge eval --task ca") == ["causal-lm"]
    assert completed("isomerge eval --kind do") == ["documents"]
    assert completed("isomerge align --level p") == ["permutation"]
    assert completed("isomerge merge --out-dtype bf") == ["bfloat16"]
    assert completed("isomerge list m") == ["methods"]


def test_words_for_a_shell_are_those_the_library_knows() -> None:
    from isomerge import choices
    from isomerge.checkpoint.dtypes import FLOATS
    from isomerge.merging.data_methods import ALL_METHODS

    assert {f"torch.{name}" for name in choices.DTYPES} == set(map(str, FLOATS.values()))
    assert choices.methods() == {name: method.summary for name, method in sorted(ALL_METHODS.items())}


def test_a_line_is_completed_without_anything_heavy() -> None:
    """The whole program and not the one function: flags before and after, and defaults, are looked at too."""
    code = (
        "import atexit, sys; sys.argv = ['isomerge']\n"
        "heavy = {'torch', 'numpy', 'scipy', 'transformers'}\n"
        "atexit.register(lambda: print(*sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        "from isomerge.cli import main\nmain()"
    )
    words = "isomerge merge a b --out-dtype bf16 --method ti"
    settings = {"_ISOMERGE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["ties"] and done.stderr.split() == []


def test_methods_are_completed_without_anything_heavy() -> None:
    code = (
        "import sys\nfrom isomerge.choices import methods\nfrom isomerge.cli.flags import offer\n"
        "print(*(name for name, summary in offer(methods)('dare') if summary))\n"
        "print(*sorted({'torch', 'numpy', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["dare_linear dare_ties", ""]


@pytest.mark.parametrize("program", sorted(MERGEKIT))
def test_a_shell_completes_the_flags_of_a_program_of_mergekit(program: str) -> None:
    """Started by its own entry point, as pyproject.toml declares it."""
    declared = re.search(rf'^{program} = "([\w.]+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    code = f"import sys; sys.argv = ['{program}']; from {declared[1]} import {declared[2]}; {declared[2]}()"
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    asked = {variable: "complete_bash", "COMP_WORDS": f"{program} --lazy-u", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["--lazy-unpickle"]


def test_the_script_for_a_shell_is_printed() -> None:
    done = isomerge(_ISOMERGE_COMPLETE="source_bash")
    assert done.returncode == 0 and "complete -o default -F _isomerge_completion isomerge" in done.stdout
    assert "--install-completion" in isomerge("--help").stdout


# --- terminals and pipes ----------------------------------------------------------------------------------------------
BAR = (
    "import time\nfrom isomerge.cli.output import progress_bar as bar\n"
    "with bar('bytes') as progress:\n"
    "    for done in range(6):\n"
    "        progress(done * 10**9, 6 * 10**9, 'merging')\n"
    "        time.sleep(0.15)\n"
)


@pytest.mark.slow
def test_nothing_but_text_goes_into_a_pipe() -> None:
    done = isomerge("list", "architectures", TERM="xterm-256color")
    assert done.returncode == 0 and "\x1b" not in done.stdout and done.stderr == ""


@pytest.mark.slow
def test_no_color_is_obeyed_on_a_terminal() -> None:
    table = SHOW.format("isomerge.reporting.terminal", "catalogue_table", {"methods": [{"name": "x", "summary": "y"}]})
    assert not COLOUR.search(on_a_terminal(table, NO_COLOR="1"))
    assert COLOUR.search(on_a_terminal(BAR)) and not COLOUR.search(on_a_terminal(BAR, NO_COLOR="1"))


def test_the_bar_shows_what_is_done_bytes_and_the_time_left() -> None:
    shown = on_a_terminal(BAR)
    assert "merging" in shown and re.search(r"\d\.\d/6\.0 GB", shown)
    assert re.search(r"0:00:0\d", shown)


def test_no_bar_is_shown_before_there_is_something_to_tell() -> None:
    shown = on_a_terminal(
        "import time\nfrom isomerge.cli.output import progress_bar as bar\n"
        "with bar('steps') as progress:\n"
        "    time.sleep(0.3)\n    progress(1, 3, 'measuring')\n    time.sleep(0.3)\n"
    )
    assert "1/3" in shown and "0/?" not in shown


@pytest.mark.slow
def test_what_a_sweep_says_while_the_bar_is_shown_has_a_line_of_its_own() -> None:
    shown = on_a_terminal(
        "import time\nfrom isomerge.cli.output import progress_bar as bar\nfrom isomerge.cli.sweep import announced\n"
        "with bar('both') as progress:\n"
        "    report = announced('3 points of t', progress)\n"
        "    time.sleep(0.3)\n"
        "    report(0, 3, 'measuring')\n"
        "    time.sleep(0.3)\n"
    )
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown))
    assert "3 points of t" in lines


ADVICE: dict[str, Any] = {
    "summary": "Strangers.", "reasons": [], "layers": [], "spaces": [], "weights": None,
    "suggestion": f"isomerge merge '{'a long path/' * 10}a' b --method linear --align -o merged",
    "recipe": f"# with data ({'images or texts like those they saw, ' * 5}) more\nmerge_method: linear\n",
}  # fmt: skip
SHOW = "from isomerge.cli.output import Voice\nfrom {} import {} as table\nVoice(False, False).show({!r}, table)"


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["60", None])
def test_what_is_to_be_copied_is_never_folded(columns: str | None) -> None:
    """On a narrow terminal, and in a pipe."""
    code = SHOW.format("isomerge.cli.check", "full_table", ADVICE)
    if columns is None:
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    else:
        shown = on_a_terminal(code, COLUMNS=columns, NO_COLOR="1").replace("\r\n", "\n")
    assert f"try: {ADVICE['suggestion']}\n" in shown and f"\n{ADVICE['recipe']}" in shown


@pytest.mark.slow
def test_a_table_on_a_narrow_terminal_loses_nothing() -> None:
    address = "https://example.org/" + "abcdefghij" * 8
    code = SHOW.format("isomerge.reporting.terminal", "entry_table", {"name": "x", "at": address})
    shown = on_a_terminal(code, COLUMNS="40", NO_COLOR="1")
    assert address in "".join(re.sub(r"\x1b\[[\d;]*m", "", shown).split()) and "…" not in shown


@pytest.mark.slow
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


@pytest.mark.slow
def test_ctrl_c_names_what_is_left_and_the_command_that_goes_on(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_model(tmp_path / name, seed)
    command = ["merge", "a", "b", "-o", "my out", "--threads", "1", "--no-verify", "--json"]
    slow = (
        "import time, sys, isomerge.merging.run.jobs as p; old = p.Job.pieces\n"
        "def pieces(self):\n    time.sleep(0.2)\n    yield from old(self)\n"
        f"p.Job.pieces = pieces; sys.argv = ['isomerge', *{command!r}]\nfrom isomerge.cli import main\nmain()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=hear_ctrl_c,
    )  # fmt: skip
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
    resume = shlex.split(told.strip().rpartition("continues from there: ")[2])
    assert resume == ["isomerge", *command]
    done = subprocess.run([sys.executable, "-m", *resume], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensors"] == 30 and not partial.exists()


@pytest.fixture
def models(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_model(tmp_path / name, seed)


def interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def test_ctrl_c_after_a_merge_was_written_is_finished_by_the_same_command(
    run: Any, models: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("isomerge.merging.outcome.merged.Merged.write_report", interrupt)
        done = run("merge a b -o out")
    assert done.exit_code == 130 and "--force" not in done.stderr
    assert done.stderr.endswith("the same command continues from there: isomerge merge a b -o out\n")
    assert not (tmp_path / "out" / "report.html").exists()
    assert run("merge a b -o out").exit_code == 0 and (tmp_path / "out" / "report.html").exists()
    assert run("verify out").exit_code == 0 and not (tmp_path / "out" / ".isomerge-partial").exists()


def test_ctrl_c_before_a_model_is_replaced_does_not_take_the_old_one_for_the_new(
    run: Any, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("merge a b -o out").exit_code == 0
    monkeypatch.setattr("isomerge.merge_recipe", interrupt, raising=False)
    told = run("merge b a -o out --force").stderr
    assert "remain: out. The same command starts again: isomerge merge b a -o out --force" in told
    assert "complete" not in told


def test_ctrl_c_after_an_alignment_was_written_says_that_it_is_complete(
    run: Any, api: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def save(out: Path, **kwargs: Any) -> Any:
        out.mkdir()
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt  # while its function is compared

    monkeypatch.setattr(api, "save", save)
    told = run("align b a -o out").stderr
    assert "out is complete; the steps after writing were not done: with --force the same command" in told


def test_ctrl_c_before_the_first_point_of_a_sweep_asks_for_no_force(
    run: Any, models: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def begin(*args: Any, out: Path, **kwargs: Any) -> Any:
        out.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("isomerge.sweep", begin, raising=False)
    done = run("sweep a b --method linear --over weight=0:1:0.5 --data digits -o swept")
    assert done.exit_code == 130 and "The same command starts again: isomerge sweep" in done.stderr
    assert "--force" not in done.stderr
