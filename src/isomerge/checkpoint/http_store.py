"""https://: byte ranges of files on a web server, on the session of fsspec.

Its own reading of a range takes whatever a server sends. Here an answer must be the range that was asked for, of the
file that was opened, and no more of it is read than that.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from isomerge.checkpoint.remote_store import (
    PERMANENT,
    RefusedError,
    RemoteFolder,
    RemoteStamp,
    unreachable,
)
from isomerge.errors import CheckpointError
from isomerge.packages import why_not_imported

CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
PASSING = {408, 425, 429, 500, 502, 503, 504}
ABSENT = {403, 404, 410}
"""A bucket that may be read and not listed answers 403 for what is not there."""
ATTEMPTS = 4
AT_ONCE = 16


class HttpFolder(RemoteFolder):
    """A folder of files on a web server that answers range requests."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._made: tuple[int, Any] | None = None
        self._known: dict[str, RemoteStamp] = {}
        self._files()

    def _files(self) -> Any:
        if self._made is None or self._made[0] != os.getpid():
            self._made = os.getpid(), self._file_system()
        return self._made[1]

    def _file_system(self) -> Any:
        try:
            import aiohttp
            from fsspec.config import conf
            from fsspec.implementations.http import HTTPFileSystem
        except ImportError as error:
            raise CheckpointError(
                f"While opening {self.url}: {why_not_imported('aiohttp', error)}.", module="aiohttp"
            ) from error
        # Proxies and .netrc as other tools take them; what the user's fsspec settings say comes first.
        asked = conf.get("http", {}).get("client_kwargs", {})
        patience = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
        return HTTPFileSystem(encoded=True, client_kwargs={"trust_env": True, "timeout": patience, **asked})

    def stamps(self, asked: Iterable[str]) -> dict[str, RemoteStamp]:
        names = list(asked)
        answers = self._together([self._asked_again(name) for name in names])
        found: dict[str, RemoteStamp] = {}
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, RemoteStamp):
                found[name] = answer
            elif answer is not None:
                raise unreachable(f"opening {self.url}", answer) from None
        self._known |= {name: found[name] for name in found if name not in self._known}
        return found

    def _pieces(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Any]:
        return self._together([self._range(name, start, end) for start, end in spans])

    def _together(self, work: list[Any]) -> list[Any]:
        from fsspec.asyn import sync

        async def run() -> list[Any]:
            gate = asyncio.Semaphore(AT_ONCE)

            async def one(job: Any) -> Any:
                async with gate:
                    return await job

            return await asyncio.gather(*map(one, work), return_exceptions=True)

        return list(sync(self._files().loop, run))

    async def _asked_again(self, name: str) -> RemoteStamp | None:
        for attempt in range(ATTEMPTS):
            try:
                return await self._stamp(name)
            except Exception as error:  # aiohttp, the network and TLS have their own classes
                if attempt + 1 == ATTEMPTS or isinstance(error, (RefusedError, *PERMANENT)):
                    raise
                await asyncio.sleep(0.3 * 3**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _stamp(self, name: str) -> RemoteStamp | None:
        """Size and tag, learnt from one byte: not every server answers HEAD."""
        async with self._get(await self._files().set_session(), name, 0, 1) as answer:
            if answer.status in ABSENT:
                return None
            if answer.status == 416:  # an empty file has no first byte
                return RemoteStamp(0, _tag(answer.headers))
            if answer.status == 206:
                _, _, size = _served(answer.headers)
                return RemoteStamp(size, _tag(answer.headers))
            self._require(answer.status == 200, answer.status)
            length = answer.headers.get("Content-Length", "")
            raise RefusedError(
                "the server does not answer range requests, so nothing but whole files could be read"
                f"{f' ({int(length):,} bytes)' if length.isdigit() else ''}; download the model and name its folder"
            )

    async def _range(self, name: str, start: int, end: int) -> bytes:
        async with self._get(await self._files().set_session(), name, start, end) as answer:
            self._require(answer.status == 206, answer.status)
            first, last, size = _served(answer.headers)
            known = self._known.get(name)
            if known is not None and known != RemoteStamp(size, _tag(answer.headers)):
                raise RefusedError("the file changed since it was opened")
            if (first, last + 1) != (start, end):
                raise RefusedError(f"the server sent bytes {first:,} to {last:,} in place of those asked for")
            try:
                return bytes(await answer.content.readexactly(end - start))
            except asyncio.IncompleteReadError as error:
                raise OSError(f"the answer ended {end - start - len(error.partial):,} bytes early") from None
            except Exception:  # in the classes of aiohttp
                raise OSError("the connection broke off") from None

    def _get(self, session: Any, name: str, start: int, end: int) -> Any:
        address = self._files().encode_url(self.address(quote(name)))
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        return session.get(address, headers=headers, max_redirects=5)

    @staticmethod
    def _require(good: bool, status: int) -> None:
        if good:
            return
        if status in PASSING:
            raise OSError(f"the server answers {status}")
        if status in ABSENT or status == 401:
            raise RefusedError(f"the server answers {status}: there is no such file, or it may not be read")
        raise RefusedError(f"the server answers {status} to a range request")


def _served(headers: Any) -> tuple[int, int, int]:
    """First byte, last byte and size of the whole file."""
    match = CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if match is None or headers.get("Content-Encoding", "identity") != "identity":
        raise RefusedError("the server's answer does not say which bytes of the file it holds")
    first, last, size = (int(number[:20]) for number in match.groups())
    return first, last, size


def _tag(headers: Any) -> str | None:
    tag = headers.get("ETag") or headers.get("Last-Modified")
    return str(tag) if tag else None
