"""A stand-in of the hub for uploads: its HTTP interface on this computer, and what was put there."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """As much of the hub's HTTP interface as an upload needs. `repositories` is what the commits have put there, by
    branch; `files` is that of me/merged, `collections` the items of each title."""

    def __init__(self) -> None:
        names = ("me/merged", "me/first", "me/second", "org/merged")
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {name: {"main": {}} for name in names}
        self.files = self.repositories["me/merged"]
        self.collections: dict[str, list[dict]] = {}
        self.objects: dict[str, bytes] = {}
        self.created: dict | None = None
        self.requests: list[str] = []
        self.refuse: dict[str, int] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path, _, query = self.path.partition("?")
                hub.requests.append(f"{self.command} {path}")
                hub.proposed = "create_pr=1" in query
                status, reply = hub.reply(self.command, unquote(path), body, self.headers.get("Authorization"))
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                if status == 401:
                    self.send_header("X-Error-Message", "Invalid credentials in Authorization header")
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_HEAD = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def reply(self, method, path, body, authorization):
        if path.startswith("/storage/") and method == "PUT":
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}
        if authorization != "Bearer hf_good":
            return 401, {"error": "Invalid username or password."}
        for part, status in self.refuse.items():
            if part in path:
                return status, {"error": "no"}
        if path == "/api/repos/create":
            exists, self.created = self.created is not None, json.loads(body)
            if self.created["name"] != "merged":
                exists = False
            return 409 if exists else 200, {"url": f"{self.url}/{self.created['organization']}/{self.created['name']}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [
                {**o, "actions": {"upload": {"href": f"{self.url}/storage/{o['oid']}"}}} for o in wanted]}  # fmt: skip
        if path.startswith("/api/collections"):
            return self.collection(path, json.loads(body or b"{}"))
        _, _, _, owner, name, verb, *rest = path.split("/")
        if f"{owner}/{name}" not in self.repositories:
            return 404, {"error": "Repository not found"}
        return self.repository(f"{owner}/{name}", verb, "/".join(rest), body)

    def collection(self, path, body):
        _, _, _, *rest = path.split("/")
        if not rest:
            exists = body["title"] in self.collections
            self.collections.setdefault(body["title"], [])
            slug = f"{body['namespace']}/{body['title'].lower().replace(' ', '-')}-0123"
            self.owner_of_collections = body["namespace"]
            return 409 if exists else 200, self.shown_collection(slug)
        slug = "/".join(rest).removesuffix("/items")
        if path.endswith("/items"):
            items = next(iter(self.collections.values()))
            exists = body["item"]["id"] in [item["id"] for item in items]
            if not exists:
                items.append(body["item"])
            return 409 if exists else 200, self.shown_collection(slug)
        return 200, self.shown_collection(slug)

    @staticmethod
    def shown_collection(slug):
        about = {"title": "t", "owner": {"name": "me"}, "items": [], "lastUpdated": "2026-01-01T00:00:00.000Z"}
        return {"slug": slug, **about, "position": 0, "private": True, "theme": "blue", "upvotes": 0}

    def repository(self, name, verb, branch, body):
        files = self.repositories[name]
        if verb == "branch":
            files[branch] = dict(files["main"])
            return 200, {}
        if verb == "tree":
            present = files[branch].items()
            return 200, [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in present]
        if verb == "preupload":
            mode = {True: "lfs", False: "regular"}
            return 200, {"files": [
                {"path": f["path"], "uploadMode": mode[f["path"].endswith(".safetensors")], "shouldIgnore": False}
                for f in json.loads(body)["files"]]}  # fmt: skip
        assert verb == "commit", verb
        proposed = {}
        if self.proposed:
            branch, proposed = "refs/pr/1", {"pullRequestUrl": f"{self.url}/{name}/discussions/1"}
            files[branch] = dict(files["main"])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[branch][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[branch][value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[branch][value["path"]]
            else:
                self.message = value["summary"]
        return 200, {
            "success": True, "commitUrl": f"{self.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT, **proposed,
        }  # fmt: skip


@contextlib.contextmanager
def hub_of_this_computer(scratch: Path, token: str | None = None) -> Iterator[Hub]:
    """The hub that huggingface_hub asks meanwhile. No token of this computer is seen, but `token`."""
    from huggingface_hub import constants

    hub = Hub()
    proxies = [word for name in ("http_proxy", "https_proxy", "all_proxy") for word in (name, name.upper())]
    hidden = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", *proxies}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    kept |= {} if token is None else {"HF_TOKEN": token}
    threading.Thread(target=hub.server.serve_forever, args=(0.02,), daemon=True).start()
    with (
        patch.dict(os.environ, kept, clear=True),
        patch.object(constants, "ENDPOINT", hub.url),
        patch.object(constants, "HF_HUB_DISABLE_XET", True),
        patch.object(constants, "HF_HUB_OFFLINE", False),
        patch.object(constants, "HF_TOKEN_PATH", str(scratch / "no-token")),
    ):
        yield hub
    hub.server.shutdown()
    hub.server.server_close()
