"""The command line: one short file per verb. Nothing heavy is imported until a verb runs."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `isomerge` console script."""
    from isomerge.cli import streams

    streams.prepare()
    from isomerge.cli.app import app

    with streams.printed():
        app()
