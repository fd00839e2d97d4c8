"""The addresses of the page: what each takes, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from isomerge import __version__
from isomerge.errors import IsomergeError
from isomerge.json_files import JsonError, parse_json
from isomerge.reporting.record import PAGE
from isomerge.studio.actions import LONGEST, Actions, Given
from isomerge.studio.folder import PICTURE, Folder
from isomerge.studio.guard import FILES, FOREIGN_PAGES, FileLinks, Guard
from isomerge.studio.jobs import Jobs
from isomerge.studio.recipe_form import methods

SHOWN = (PAGE, PICTURE)
"""The files of the folder that are shown as they are."""
STATIC = {
    "studio.css": "text/css", "icon.svg": "image/svg+xml",
    "studio.js": "text/javascript", "views.js": "text/javascript", "dom.js": "text/javascript",
}  # fmt: skip
READING = ("listing", "runs")
WRITING = ("lineage", "points", "open", "check", "recipe", "merge", "again", "sweep", "cancel")


def application(root: Path, token: str, port: int, jobs: Jobs) -> Guard:
    """The page for one folder, which must be the working directory: recipes name models relative to it."""
    folder, links = Folder(root), FileLinks(token)
    actions = Actions(folder, links, jobs)
    routes = [
        Route("/", lambda request: Response(page(folder.root.name or str(folder.root)), media_type="text/html")),
        *(Route(f"/api/{name}", _read(getattr(actions, name))) for name in READING),
        *(Route(f"/api/{name}", _written(getattr(actions, name)), methods=["POST"]) for name in WRITING),
        Route(f"/{FILES}/{{mark}}/{{name:path}}", _file(folder, links)),
        Route("/{name}", _static),
    ]
    handlers: dict[Any, Any] = {IsomergeError: _refused, OSError: _refused}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), token, port)


def page(name: str) -> str:
    """The page itself; all that changes is fetched by its script."""
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_text("page.html"))
    # JSON that cannot end the element it stands in.
    offered = json.dumps(methods()).replace("<", "\\u003c")
    return template.render(name=name, version=__version__, methods=offered)


@cache
def _text(file: str) -> str:
    return (files("isomerge.studio") / "templates" / file).read_text(encoding="utf-8")


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        raise HTTPException(404)
    return Response(_text(name), media_type=STATIC[name])


def _read(action: Callable[[Given], Given]) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        return JSONResponse(action({}))

    return answer


def _written(action: Callable[[Given], Given]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        given = await _body(request)
        return JSONResponse(await run_in_threadpool(action, given))

    return answer


async def _body(request: Request) -> Given:
    """The JSON object of a request. Its type is one that a form of another page cannot send."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "Send application/json.")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > 2 * LONGEST:
            raise HTTPException(413, "This is too much for a recipe.")
    try:
        given = parse_json(body)
    except JsonError as error:
        raise HTTPException(400, f"The request cannot be read: {error}.") from error
    if not isinstance(given, dict):
        raise HTTPException(400, "The request is no JSON object.")
    return given


def _file(folder: Folder, links: FileLinks) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        name = request.path_params["name"]
        if not links.is_valid(request.path_params["mark"], name):
            raise HTTPException(403, "This link is not of this page.")
        path = folder.inside(name)
        if path.name not in SHOWN or not path.is_file():
            raise HTTPException(404)
        return FileResponse(path, headers={"Content-Security-Policy": FOREIGN_PAGES})

    return answer


def _refused(request: Request, error: Exception) -> Response:
    text = str(error) if isinstance(error, IsomergeError) else f"A file could not be used: {error}. Check its rights."
    return JSONResponse({"error": text}, 400)
