"""Who may ask: only this computer's browser, and only with the link that was printed.

A page on the internet can send requests to this computer, and a name of its own that leads here (DNS rebinding) would
let it read the answers. So the name must be this computer's, a request that a page of another origin makes is refused,
and all of it needs a token that no other page knows.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OWN_PAGES = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; frame-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FOREIGN_PAGES = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
"""For files of the folder: anybody may have written them, so they run without an origin and reach nothing."""
FILES = "file"
"""The first step of the addresses of such files, in place of the token."""
HEADERS = {
    "Content-Security-Policy": OWN_PAGES,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """An ASGI application around another one, which sees paths without the token."""

    def __init__(self, application: ASGIApp, token: str, port: int) -> None:
        self._application, self._token = application, token.encode()
        names = ("127.0.0.1", "localhost")
        self._hosts = {f"{name}:{port}" for name in names} | (set(names) if port == 80 else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close"})

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            return await PlainTextResponse(f"{refusal}\n", 403)(scope, receive, guarded)
        first, _, rest = scope["path"].removeprefix("/").partition("/")
        if (
            first != FILES and scope["path"] == f"/{first}"
        ):  # addresses on the page are relative to the folder that the token is
            return await RedirectResponse(f"/{first}/")(scope, receive, guarded)
        path = scope["path"] if first == FILES else f"/{rest}"
        return await self._application({**scope, "path": path, "root_path": ""}, receive, guarded)

    def _refusal(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        if headers.get("host") not in self._hosts:
            return "This page answers only to 127.0.0.1 and localhost."
        origin = headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return "Another page may not ask."
        first = scope["path"].removeprefix("/").partition("/")[0]
        if first != FILES and not hmac.compare_digest(first.encode(), self._token):
            return "The link lacks its token. Open the one that isomerge studio has printed."
        return None


class FileLinks:
    """Addresses under which one file of the folder is shown, without the token of the page.

    What is shown may have been written by anybody and knows its own address, so that must open nothing else.
    """

    def __init__(self, token: str) -> None:
        self._key = hashlib.sha256(b"files " + token.encode()).digest()

    def to(self, name: str) -> str:
        return f"/{FILES}/{self._mark(name)}/{quote(name)}"

    def is_valid(self, mark: Any, name: str) -> bool:
        return hmac.compare_digest(str(mark).encode(), self._mark(name).encode())

    def _mark(self, name: str) -> str:
        return hmac.new(self._key, name.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
