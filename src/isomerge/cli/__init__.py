"""The command line: one short file per verb. Nothing heavy is imported until a verb runs."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `isomerge` console script."""
    _run([])


def mergekit_yaml() -> None:
    """Entry point of `mergekit-yaml`, and so on: verbs that are programs of their own."""
    _run(["mergekit-yaml"])


def mergekit_multi() -> None:
    _run(["mergekit-multi"])


def mergekit_moe() -> None:
    _run(["mergekit-moe"])


def mergekit_tokensurgeon() -> None:
    _run(["mergekit-tokensurgeon"])


def mergekit_extract_lora() -> None:
    _run(["mergekit-extract-lora"])


def _run(verb: list[str]) -> None:
    from isomerge.cli import streams

    streams.prepare()
    from isomerge.cli.app import app, complete_alone

    with streams.printed():
        for name in verb:
            complete_alone(name)
        app([*verb, *sys.argv[1:]])
