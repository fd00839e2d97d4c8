"""What is below the folder that the page works in: models, data, and what isomerge has written there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isomerge.checkpoint.staging import was_interrupted
from isomerge.errors import IsomergeError, RequestError
from isomerge.json_files import JsonError, read_json
from isomerge.reporting.kept_measurements import measurements_beside, searched_scores
from isomerge.reporting.record import PAGE, RECORD, read_record
from isomerge.reporting.verdict import verdict
from isomerge.text import visible

DEEPEST = 4
MOST_FOLDERS = 5000
"""Looked into: a home directory must not keep the page waiting."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
DATA = (".txt", ".jsonl", ".csv", ".tsv", ".conll", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".zip")
SWEEP, PICTURE = "sweep.json", "sweep.svg"

Entry = dict[str, Any]


class Folder:
    """Names are relative to it, with slashes; none leads out of it, also not through a link."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def inside(self, name: Any) -> Path:
        """The path of a name; what leads out of the folder is refused."""
        if isinstance(name, str) and name.strip() and "\0" not in name:
            path = Path(os.path.normpath(self.root / name.strip()))
            if path.resolve().is_relative_to(self.root):
                return path
        raise RequestError(f"'{visible(str(name), keep='')}' is not below {self.root}. Name something in it.")

    def found(self, reference: str) -> Path | None:
        """The folder that a reference names; None for a hub id, and for what was moved away or lies elsewhere."""
        try:
            path = self.inside(os.path.expanduser(reference))
        except (RequestError, OSError, ValueError):
            return None
        return path if path.is_dir() else None

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def listing(self) -> dict[str, Any]:
        """Everything the page offers, sorted by name, and what was written last before the rest."""
        models: list[Entry] = []
        data: list[str] = []
        recipes: list[str] = []
        outputs: list[Entry] = []
        for path, names in self._folders():
            if found := self._model(path, names):
                models.append(found)
            data += [self.name(path / name) for name in names if name.endswith(DATA)]
            recipes += [self.name(path / name) for name in names if _is_recipe(path / name)]
            if found := self._output(path, names):
                outputs.append(found)
        outputs.sort(key=lambda entry: -_written(self.root / entry["path"]))
        return {"models": models, "data": data, "recipes": recipes, "outputs": outputs}

    def _folders(self) -> Iterator[tuple[Path, list[str]]]:
        """Every folder with the names of its files; hidden ones, and links that lead out, are passed over."""
        seen: set[Path] = set()
        waiting = [(self.root, 0)]
        while waiting and len(seen) < MOST_FOLDERS:
            path, depth = waiting.pop()
            try:
                real = path.resolve()
                if real in seen or not real.is_relative_to(self.root):
                    continue
                entries = sorted(os.scandir(path), key=lambda entry: entry.name)
            except OSError:
                continue  # it may not be read, and so offers nothing
            seen.add(real)
            shown = [entry for entry in entries if not entry.name.startswith(".")]
            yield path, [entry.name for entry in shown if entry.is_file()]
            if depth < DEEPEST:
                below = [path / entry.name for entry in shown if entry.is_dir()]
                waiting += [(one, depth + 1) for one in reversed(below)]

    def _model(self, path: Path, names: list[str]) -> Entry | None:
        """A folder with weights and a config."""
        config = next((name for name in ("config.json", "adapter_config.json") if name in names), None)
        weights = [name for name in names if name.endswith(WEIGHTS)]
        if config is None or not weights or path == self.root:
            return None
        try:
            content = read_json(path / config)
        except (OSError, JsonError):
            content = {}
        content = content if isinstance(content, dict) else {}
        is_adapter = config == "adapter_config.json"
        kind = content.get("peft_type") if is_adapter else content.get("model_type")
        dtype = content.get("dtype") or content.get("torch_dtype")
        return {
            "path": self.name(path),
            "kind": "adapter" if is_adapter else "model",
            "type": kind if isinstance(kind, str) else "unknown",
            "dtype": dtype if isinstance(dtype, str) else None,
            "bytes": sum((path / name).stat().st_size for name in weights if (path / name).exists()),
        }

    def _output(self, path: Path, names: list[str]) -> Entry | None:
        """What isomerge has written, or began to write."""
        entry: Entry = {"path": self.name(path), "report": PAGE in names, "picture": PICTURE in names}
        if path != self.root and was_interrupted(path):
            recipe = recipe_of(path)
            return entry | {"kind": "unfinished", "recipe": self.name(recipe) if recipe.is_file() else None}
        if SWEEP in names:
            return entry | {"kind": "sweep"}
        if RECORD not in names:
            return None
        try:
            record = read_record(path)
            measured = [*searched_scores(record, path.name), *measurements_beside(path)[0]]
            told = verdict(record, measured, path.name)
            said = {"tone": told.tone, "label": told.label, "summary": told.sentence} if told else {"summary": "a demo"}
            return entry | {"kind": record["kind"]} | {key: visible(text, keep="") for key, text in said.items()}
        except (IsomergeError, KeyError, TypeError, ValueError, AttributeError) as error:
            return entry | {"kind": "damaged", "summary": visible(str(error), keep="")}


def recipe_of(out: Path) -> Path:
    """Where the recipe of an output is kept: beside it, so that the command line can run it again."""
    return out.with_name(f"{out.name}.yml")


def _written(out: Path) -> float:
    """When; a later verification or measurement does not count."""
    files = [file for name in ("*.safetensors", SWEEP, RECORD) for file in out.glob(name)]
    try:
        return max((file.stat().st_mtime for file in files[:1]), default=out.stat().st_mtime)
    except OSError:
        return 0.0


def _is_recipe(path: Path) -> bool:
    """Models have YAML beside them that is none."""
    if path.suffix not in (".yml", ".yaml"):
        return False
    try:
        with path.open("rb") as file:
            return b"merge_method" in file.read(4096)
    except OSError:
        return False
