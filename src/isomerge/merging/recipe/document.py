"""Recipes as YAML: text to plain data with the line of everything in it, and recipes back to text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from isomerge.merging.recipe.problem_list import Path, Places, Problems
from isomerge.yaml_files import compose

if TYPE_CHECKING:
    from isomerge.merging.recipe.definitions import Recipe
import pathlib


def read_documents(text: str, source: str, problems: Problems) -> list[tuple[Any, Places]]:
    """Every document of a YAML text, as data and places. A document with nothing in it does not count."""
    try:
        nodes = compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        places = Places(source, {(): line} if line else {})
        problems.add(places, (), f"this is not YAML: {error.problem or error.context}{_pitfall(text, line)}")
        return []
    except yaml.YAMLError as error:  # a control character, say
        problems.general(f"this is not YAML: {error}")
        return []
    documents = []
    for node in nodes:
        if isinstance(node, yaml.ScalarNode) and not node.value:
            continue
        reader = _NodeReader(source, problems)
        documents.append((reader.read(node, ()), reader.places))
    return documents


def _pitfall(text: str, line: int | None) -> str:
    lines = text.splitlines()
    here = lines[line - 1] if line is not None and line <= len(lines) else ""
    if "\t" in here[: len(here) - len(here.lstrip())] or "\t" in here:
        return "; there is a tab on this line, and YAML is indented with spaces only"
    return "; look at the indentation, the colons and the brackets of this line and of those before it"


class _NodeReader:
    """Builds the data of one document. Keys stay text, so a token called `yes` or `1` is not turned into a value."""

    def __init__(self, source: str, problems: Problems) -> None:
        self.places, self.problems = Places(source), problems
        self._constructor = yaml.SafeLoader("")
        self._merged: set[int] = set()

    def read(self, node: yaml.Node, path: Path) -> Any:
        self.places.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        return self._mapping(node, path)

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        if node.tag == "tag:yaml.org,2002:timestamp":  # a model or a revision called 2024-01-01
            return node.value
        try:
            value = self._constructor.construct_object(node)
            if isinstance(value, int):
                float(value)  # what has too many digits for this is no number of a recipe
            return value
        except (yaml.YAMLError, ValueError, IndexError, OverflowError) as error:
            reason = getattr(error, "problem", None) or str(error)
            self.problems.add(self.places, path, f"this value cannot be read: {reason}")
            return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        if id(node) not in self._merged:
            self._refuse_twice(node, path)
            self._merged.add(id(node))
            try:
                self._constructor.flatten_mapping(node)  # `<<: *other`
            except yaml.MarkedYAMLError as error:
                self.problems.add(self.places, path, f"this cannot be merged into: {error.problem}")
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.places.lines[path] = key.start_mark.line + 1
                self.problems.add(self.places, path, "a key must be a word")
                continue
            self.places.lines[(*path, key.value)] = key.start_mark.line + 1
            mapping[key.value] = self.read(value, (*path, key.value))
        return mapping

    def _refuse_twice(self, node: yaml.MappingNode, path: Path) -> None:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in first:
                text = f"'{key.value}' is given twice, on line {first[key.value]} and on line {line}; keep one of them"
                self.problems.add(Places(self.places.source, {(): line}), (), text)
            first.setdefault(key.value, line)


# --- back to text -----------------------------------------------------------------------------------------------------
def public_yaml(recipe: Recipe) -> str:
    """The recipe for other people: data is called by its name, without where it lies on this machine."""
    data = as_data(recipe)
    _hide_places(data)
    return dump(data)


def _hide_places(value: Any) -> None:
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key == "data" and isinstance(one, dict) and "path" in one:
            one["path"] = pathlib.Path(one["path"]).name
        else:
            _hide_places(one)


def as_data(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data, without what is at its default."""
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    for key in ("align", "repair"):
        if getattr(recipe, key) is not None:
            data[key] = data[key] or True
    if recipe.tokenizer is not None:
        data["tokenizer"] = {"source": str(recipe.tokenizer.source), **data["tokenizer"]}
    return data


class _Dumper(yaml.SafeDumper):
    """Lists of numbers on one line, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    flat = all(isinstance(item, (bool, int, float)) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flat)


_Dumper.add_representer(list, _list)


def dump(data: dict[str, Any]) -> str:
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
