"""YAML, bounded: a few hundred bytes of aliases can stand for more values than any memory holds."""

from __future__ import annotations

from typing import Any

import yaml

LARGEST = 4 << 20
"""Characters."""
DEEPEST = 64
MOST_VALUES = 200_000
"""Once every alias is written out."""


class _Composer(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.depth > DEEPEST:
            raise _fault(f"it is nested more than {DEEPEST} deep", self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def compose_scalar_node(self, anchor: Any) -> Any:
        """JSON spells some characters as two halves, which PyYAML leaves apart, and zero, which no text has."""
        node = super().compose_scalar_node(anchor)
        if "\0" in node.value:
            raise _fault("a text holds the character zero", node.start_mark)
        try:
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise _fault("a text holds half a surrogate pair, which is no character", node.start_mark) from None
        return node


def compose(text: str) -> list[yaml.Node]:
    """The nodes of every document; raises yaml.YAMLError, also for what is too large, too deep or contains itself."""
    if len(text) > LARGEST:
        raise yaml.YAMLError(f"it is larger than {LARGEST >> 20} MiB")
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=_Composer) if node is not None]
    except (ValueError, IndexError, RecursionError, OverflowError) as error:  # PyYAML's own, of odd escapes
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error
    sizes: dict[int, int] = {}
    for node in nodes:
        if _size(node, sizes, set()) > MOST_VALUES:
            raise _fault(f"its aliases stand for more than {MOST_VALUES:,} values", node.start_mark)
    return nodes


def load(text: str) -> Any:
    """The data of the only document; raises yaml.YAMLError."""
    nodes = compose(text)
    if len(nodes) != 1:
        raise yaml.YAMLError(f"it holds {len(nodes)} documents")
    try:
        return yaml.SafeLoader("").construct_document(nodes[0])
    except (ValueError, IndexError, TypeError, AttributeError, KeyError, OverflowError) as error:
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error


def _size(node: yaml.Node, sizes: dict[int, int], inside: set[int]) -> int:
    """How many values a node is, with aliases written out. Each node is counted once, however often it is used."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in inside:
        raise _fault("this alias contains itself", node.start_mark)
    if id(node) not in sizes:
        inside.add(id(node))
        children = node.value if isinstance(node, yaml.SequenceNode) else [one for pair in node.value for one in pair]
        sizes[id(node)] = 1 + sum(_size(child, sizes, inside) for child in children)
        inside.discard(id(node))
    return sizes[id(node)]


def _fault(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
