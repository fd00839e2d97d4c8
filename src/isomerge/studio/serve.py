"""Serve the page, to this computer only."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from isomerge.errors import RequestError

OFFLINE = "HF_HUB_OFFLINE"


def serve(folder: Path, port: int, announce: Callable[[str], None]) -> str | None:
    """Serve until Ctrl-C. `announce` gets the link; what is returned is the command line that was running at the end.

    The process changes into the folder, so that recipes name models as they do on a command line typed there. It never
    goes online: typing a recipe must not download a model. What is run may.
    """
    import uvicorn

    listening = _listen(port)
    port = listening.getsockname()[1]
    before = os.environ.get(OFFLINE)
    os.environ[OFFLINE] = "1"
    from isomerge.studio.app import application
    from isomerge.studio.jobs import Jobs

    root = folder.resolve()
    os.chdir(root)
    token = secrets.token_urlsafe(24)
    jobs = Jobs(root, {OFFLINE: before})
    settings = uvicorn.Config(
        application(root, token, port, jobs), log_level="warning", access_log=False, server_header=False,
        lifespan="off", timeout_graceful_shutdown=2,
    )  # fmt: skip
    announce(f"http://127.0.0.1:{port}/{token}/")
    # uvicorn ends in order, and then raises the signal again.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt), listening:
            uvicorn.Server(settings).run(sockets=[listening])
    finally:
        running = jobs.close()
    return running


def _listen(port: int) -> socket.socket:
    """A socket on the loopback address; with port 0, on a free one."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if os.name != "nt":
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
    except OSError as error:
        listening.close()
        raise RequestError(
            f"Serving on port {port}: {error.strerror or error}. Choose another port, or leave it out for a free one.",
            keys=("port",),
        ) from error
    return listening
