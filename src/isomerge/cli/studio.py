"""`isomerge studio FOLDER`: a local web page to choose, check, merge and look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from isomerge.cli.flags import option, switch
from isomerge.cli.output import Voice
from isomerge.cli.verb import verb
from isomerge.errors import RequestError


@verb("Work on a local web page: choose, check, merge, look.", "isomerge studio models")
def studio(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where your models are.")] = Path("."),
    *,
    port: Annotated[int | None, option("N", "Port of the page; a free one by default.", min=1)] = None,
    browser: Annotated[bool, switch("--browser/--no-browser", "Open the page in the browser.")] = True,
    voice: Voice,
) -> None:
    """Work on a local web page: choose models, check them, compose a recipe, merge, sweep, look at reports.

    The page answers to this computer only, under a link with a secret. It lists and writes what is below FOLDER, and
    each of its actions shows the command line that does the same.
    """
    if folder.is_file():
        raise RequestError(f"{folder} is a file. Name the folder where your models are.")
    if not folder.is_dir():
        raise RequestError(f"There is no folder {folder}. Name the folder where your models are.")
    if port is not None and port > 65535:
        raise RequestError(f"--port cannot be {port}. Ports end at 65535; leave it out for a free one.")

    if voice.trust_remote_code:
        raise RequestError(
            "The page runs no code of models. Leave --trust-remote-code out; add it to a command line of the page."
        )
    from isomerge.studio.serve import serve

    def announce(link: str) -> None:
        if voice.json:
            print(json.dumps({"url": link, "folder": str(folder)}), flush=True)
        else:
            typer.echo(
                f"isomerge studio: {link}\nThe link works on this computer only. Ctrl-C ends it.", err=voice.quiet
            )
        if browser:
            import webbrowser

            webbrowser.open(link)

    running = serve(folder, port or 0, announce)
    if running is not None and not voice.is_silent:
        typer.echo(f"A run was stopped; the same command goes on with it: {running}", err=True)
