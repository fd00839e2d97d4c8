"""What the page can ask for. Every action takes and gives JSON; what takes long becomes a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import isomerge
from isomerge.arguments import require_types
from isomerge.errors import CheckpointError, RequestError
from isomerge.json_files import JsonError, checked, read_json
from isomerge.reporting.ancestors import ancestor
from isomerge.reporting.record import PAGE, write_text
from isomerge.results import plain
from isomerge.studio.folder import PICTURE, SWEEP, Folder, recipe_of
from isomerge.studio.guard import FileLinks
from isomerge.studio.jobs import Jobs, command_line
from isomerge.studio.live import judged
from isomerge.studio.recipe_form import RecipeForm

LONGEST = 1 << 20
"""Bytes of a recipe."""

Given = dict[str, Any]


class Actions:
    """Names from the page are held to the folder. Recipes are the user's own, and name what they like."""

    def __init__(self, folder: Folder, links: FileLinks, jobs: Jobs) -> None:
        self._folder, self._links, self._jobs = folder, links, jobs

    # --- look ---
    def listing(self, given: Given) -> Given:
        """Models, data, recipes and outputs, with links to reports and pictures."""
        found = self._folder.listing()
        for output in found["outputs"]:
            for key, file in (("report", PAGE), ("picture", PICTURE)):
                output[key] = self._links.to(f"{output['path']}/{file}") if output[key] else None
        return found

    def runs(self, given: Given) -> Given:
        return {"jobs": self._jobs.records()}

    def lineage(self, given: Given) -> Given:
        name = _text(given, "path")
        return ancestor(self._folder.inside(name), name, self._folder.found)

    def points(self, given: Given) -> Given:
        """The points of a sweep that is over."""
        path = self._folder.inside(_text(given, "path")) / SWEEP
        try:
            record = read_json(path)
        except (OSError, JsonError) as error:
            raise CheckpointError(f"While reading {path}: {error}. Run the sweep again.") from error
        if not isinstance(record, dict) or not isinstance(record.get("points"), list):
            raise CheckpointError(f"While reading {path}: it is no record of a sweep. Run the sweep again.")
        return record

    def open(self, given: Given) -> Given:
        """The text of a recipe."""
        path = self._folder.inside(_text(given, "path"))
        if path.suffix not in (".yml", ".yaml") or not path.is_file() or path.stat().st_size > LONGEST:
            raise RequestError(f"{path.name} is no recipe. Name a YAML file of less than {LONGEST >> 20} MiB.")
        return {"text": path.read_text(encoding="utf-8", errors="replace")}

    # --- judge ---
    def check(self, given: Given) -> Given:
        """The verdict: at once, or as a run where merges are measured on data."""
        names = given.get("models")
        require_types(models=(names, list))
        models = [self._named(name) for name in names or ()]
        words = ["check", *models]
        if given.get("data"):
            words += ["--data", self._named(given["data"])]
            return {"command": command_line(words), "job": self._jobs.add(words).number}
        result = isomerge.check(*(str(self._folder.inside(name)) for name in models))
        return {"command": command_line(words), "result": plain(_short(result.to_dict(), self._folder), strict=True)}

    def recipe(self, given: Given) -> Given:
        """A recipe while it is typed; with `form`, the form is written into the text first."""
        try:
            form = None if given.get("form") is None else checked(RecipeForm, given["form"])
        except JsonError as error:
            raise RequestError(f"The form cannot be read: {error}. Reload the page.") from error
        result: Given = plain(judged(_text(given, "text"), form), strict=True)
        return result

    # --- run ---
    def merge(self, given: Given) -> Given:
        out, recipe = self._kept_recipe(given)
        return self._run(["merge", recipe, "-o", out, *_force(given)], out)

    def again(self, given: Given) -> Given:
        """Go on with a merge that was stopped."""
        path = self._output(given)
        out, recipe = self._folder.name(path), self._folder.name(recipe_of(path))
        return self._run(["merge", _word(recipe), "-o", _word(out)], out)

    def sweep(self, given: Given) -> Given:
        out, recipe = self._kept_recipe(given)
        over, data = _text(given, "over").split(), self._named(given.get("data"))
        values = [word for one in over for word in ("--over", _word(one))]
        return self._run(["sweep", recipe, *values, "--data", data, "-o", out, *_force(given)], out)

    def cancel(self, given: Given) -> Given:
        number = given.get("number")
        require_types(number=(number, int))
        assert isinstance(number, int)
        self._jobs.cancel(number)
        return {}

    def _run(self, words: list[str], out: str) -> Given:
        return {"job": self._jobs.add(words, out).number, "command": command_line(words)}

    def _kept_recipe(self, given: Given) -> tuple[str, str]:
        """The names of the folder to write and of its recipe, which is written beside it."""
        out = self._output(given)
        path, text = recipe_of(out), _text(given, "text").rstrip() + "\n"
        if path.is_symlink() or (path.exists() and not given.get("force") and path.read_bytes() != text.encode()):
            raise RequestError(
                f"{self._folder.name(path)} holds another recipe. Choose another output, or tick Replace."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        return _word(self._folder.name(out)), _word(self._folder.name(path))

    def _output(self, given: Given) -> Path:
        """A folder whose recipe can lie beside it."""
        out = self._folder.inside(_text(given, "out"))
        if out.resolve() == self._folder.root:
            raise RequestError("The output cannot be the folder that the page works in. Name a new folder in it.")
        return out

    def _named(self, name: Any) -> str:
        """Something in the folder, as a word of a command line."""
        path = self._folder.inside(name)
        if not path.exists():
            raise RequestError(f"There is no {self._folder.name(path)} any more. Reload the page.")
        return _word(self._folder.name(path))


def _text(given: Given, key: str) -> str:
    value = given.get(key)
    require_types(**{key: (value, str)})
    return str(value)


def _word(name: str) -> str:
    """A name that cannot be taken for a flag, nor for somebody's home."""
    return f"./{name}" if name.startswith(("-", "~")) else name


def _force(given: Given) -> list[str]:
    return ["--force"] if given.get("force") else []


def _short(value: Any, folder: Folder) -> Any:
    """Texts with names relative to the folder, as they are on the command line."""
    if isinstance(value, dict):
        return {key: _short(one, folder) for key, one in value.items()}
    if isinstance(value, list):
        return [_short(one, folder) for one in value]
    return value.replace(f"{folder.root}{Path('/')}", "") if isinstance(value, str) else value
