"""The commands that faults happen to, and how one of them is run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from fuzz.injector import Injector
from isomerge.checkpoint.direct import LEAST


@dataclass
class Command:
    """A command line that writes to `out`, in a folder with its inputs, and the model that it replaces."""

    name: str
    words: list[str]
    old: Path | None = None
    past_cache: bool = False
    """Every whole page is written directly, as large pieces are, where the disk of the attack takes that."""


def run_command(command: Command, work: Path, injector: Injector | None = None) -> tuple[int, list[str]]:
    """Its exit status and the calls it made, from a child in which only this process's memory is shared."""
    log = work.parent / "calls"
    log.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.chdir(work)
            silent = os.open(log.with_name("told"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(silent, descriptor)
            code = _main(command, injector)
        finally:
            if injector is not None:
                injector._real.get("io.open", io.open)(log, "w").write("\n".join(injector.calls))
            os._exit(code)
    _, status = os.waitpid(child, 0)
    for aside in work.parent.glob(f"{work.name}.replaced.*"):
        aside.unlink()
    code = os.waitstatus_to_exitcode(status)
    return code, log.read_text().splitlines() if log.exists() else []


def run_here(command: Command, work: Path) -> None:
    before, arguments = Path.cwd(), sys.argv
    os.chdir(work)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            _main(command, None)
    finally:
        signal.alarm(0)
        os.chdir(before)
        sys.argv = arguments


def _main(command: Command, injector: Injector | None) -> int:
    from isomerge.checkpoint import direct
    from isomerge.cli import main

    signal.alarm(120)
    sys.argv = ["isomerge", *command.words]
    direct.LEAST = direct.PAGE if command.past_cache else LEAST
    if injector is not None:
        injector.install()
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def unnumbered(call: str) -> str:
    """Without the number of the process in the name of a file."""
    return re.sub(r"\d+\.partial", "partial", call)


def disk_of(folder: Path) -> str:
    """A hash of everything in a folder, names and bytes: a command finds the same there as at another time."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{path.relative_to(folder)} {path.is_dir()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def files_of(folder: Path) -> dict[str, str]:
    """The content of a model folder; the time and memory that a run took are left out."""
    found = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(".isomerge-partial/"):
            found[name] = hashlib.sha256(_lasting(path)).hexdigest()
    return found


def _lasting(path: Path) -> bytes:
    if path.name == "report.html":
        return b""  # made from isomerge.json
    if path.name != "isomerge.json":
        return path.read_bytes()
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        return path.read_bytes()  # damaged: no version of it
    return json.dumps({key: value for key, value in record.items() if key != "run"}, sort_keys=True).encode()


def is_json(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return False


def commands(work: Path) -> dict[str, Command]:
    """The commands, with their inputs in `work` and their data outside of it."""
    import models

    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        shutil.copytree(models.model("llama", seed, dtype=models.torch.float32), work / name)
    for name, seed in (("d", 0), ("e", 1)):
        shutil.copytree(models.model("llama", seed, dtype=models.torch.float32, num_hidden_layers=1), work / name)
    for name, seed in (("v", 0), ("w", 1)):
        shutil.copytree(models.model("vit", seed, dtype=models.torch.float32), work / name)
    for name, seed in (("f", 0), ("g", 1)):
        wide = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
        shutil.copytree(models.model("llama", seed, dtype=models.torch.float32, **wide), work / name)
    outside = work.parent
    data = pictures(outside / "pictures")
    old = outside / "old"
    shutil.copytree(work / "c", old)
    for name in ("chat_template.jinja", "README.md", "notes.txt"):
        (old / name).write_text(f"{name} of the old model")
    shards = ["--shard-size", "900", "--threads", "1"]
    merge = ["merge", "a", "b", "-o", "out", *shards]
    align = ["align", "e", "d", "-o", "out", *shards, "--sweeps", "3"]  # an alignment that takes no time
    reconstruct = ["merge", "v", "w", "--method", "reconstruct", "--data", str(data), "-o", "out", "--threads", "1"]
    return {
        "merge": Command("merge", merge),
        "merge past the cache": Command(
            "merge past the cache",
            ["merge", "f", "g", "-o", "out", "--shard-size", "40KB", "--threads", "1"],
            past_cache=True,
        ),
        "merge --force": Command("merge --force", [*merge, "--force"], old),
        "align": Command("align", align),
        "align --force": Command("align --force", [*align, "--force"], old),
        "reconstruct": Command("reconstruct", reconstruct),
    }


def pictures(folder: Path) -> Path:
    """A dozen of them in class folders."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(12):
        place = folder / f"LABEL_{number % 5}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(place / f"{number:02}.png")
    return folder
