"""Bring staged files to their places so that a stop at any moment can be undone: the old model or the new one, whole.

What was there is moved aside first, then every staged file takes its place, and the last one decides: once it is there
the model is complete, and before that everything can go back. The journal holds the plan, so that a later run can do
what a killed one could not.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from isomerge import system
from isomerge.checkpoint.journal import Commit

ASIDE = ".old"
"""In the staging folder: the files that are being replaced."""
LAST = ("config.json", "adapter_config.json", "model_index.json")
"""Without one of these nothing takes a folder for a model."""
STALE = re.compile(
    r"(model|pytorch_model|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?|adapter_config\.json|"
    r"config\.json|model_index\.json|isomerge(\.lock)?\.json|report\.html|\.(isomerge\.json|report\.html)\.\d+\.partial"
)
SIDE = re.compile(
    r"README\.md|mergekit_config\.yml|generation_config\.json|(tokenizer|special_tokens_map|added_tokens|vocab|merges|"
    r"chat_template|preprocessor_config|processor_config|spiece|sentencepiece|video_preprocessor_config)[\w.]*"
)


@dataclass(frozen=True)
class Renaming:
    """From a staging folder to the output folder it lies in, and back."""

    out: Path
    staged: Path

    def plan(self, files: Sequence[str]) -> Commit:
        """What `run` will do: beside what is replaced, files of the model that was here go. Beside another's weights
        they would be wrong."""
        stale = {path.name for path in self.out.iterdir() if STALE.fullmatch(path.name) or SIDE.fullmatch(path.name)}
        old = stale | {name for name in files if os.path.lexists(self.out / name)}
        # First what makes it look finished, so that what is left never does.
        return Commit(files=list(files), old=sorted(old, key=lambda name: (name not in LAST, name)))

    def is_over(self, commit: Commit) -> bool:
        """Whether the last file is in its place."""
        last = commit.files[-1]
        return os.path.lexists(self.out / last) and not os.path.lexists(self.staged / last)

    def run(self, commit: Commit) -> None:
        for name in commit.old:
            _move(self.out / name, self.staged / ASIDE / name)
        for name in commit.files[:-1]:
            _move(self.staged / name, self.out / name)
        sync_folders(self.out, commit.files)
        _move(self.staged / commit.files[-1], self.out / commit.files[-1])
        sync_folders(self.out, commit.files[-1:])

    def undo(self, commit: Commit) -> None:
        """Everything where it was before `run`, however far that came; may itself be stopped and done again."""
        for name in reversed(commit.files):
            moved_aside = name not in commit.old or os.path.lexists(self.staged / ASIDE / name)
            if moved_aside and os.path.lexists(self.out / name) and not os.path.lexists(self.staged / name):
                _move(self.out / name, self.staged / name)
        for name in reversed(commit.old):
            if os.path.lexists(self.staged / ASIDE / name):
                _move(self.staged / ASIDE / name, self.out / name)
        for folder in sorted({(self.out / name).parent for name in commit.files} - {self.out}, reverse=True):
            with contextlib.suppress(OSError):  # it holds other files
                folder.rmdir()
        sync_folders(self.out, [])


def sync_folders(folder: Path, names: Iterable[str]) -> None:
    """Bring the folder's list of files to the disk, and those of the subfolders in which the named files are."""
    inner = {parent for name in names for parent in (folder / name).parents if folder in parent.parents}
    for one in sorted(inner, reverse=True):
        system.sync_folder(one)
    system.sync_folder(folder)


def _move(source: Path, target: Path) -> None:
    if not target.parent.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)
