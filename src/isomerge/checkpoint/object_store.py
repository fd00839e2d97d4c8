"""Writing objects: s3:// and gs://. An object appears whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from isomerge.checkpoint.remote_store import FsspecFolder, RemoteStamp, tag_of
from isomerge.errors import CheckpointError

PIECE = 16 << 20
"""Bytes of one part of an upload; a multiple of what the stores ask for."""
MOST_PARTS = 9_000
AT_ONCE = 4


class ObjectStore(FsspecFolder):
    """A folder of objects that can be written and deleted."""

    def write(self, name: str, content: bytes) -> None:
        self._tried(f"writing {self.address(name)}", lambda files: files.pipe_file(self.path(name), content))

    def delete(self, name: str) -> None:
        def remove(files: Any) -> None:
            try:
                files.rm_file(self.path(name))
            except FileNotFoundError:
                return

        self._tried(f"deleting {self.address(name)}", remove)

    def upload(self, path: Path, name: str, tell: Callable[[int], None]) -> RemoteStamp:
        """Send a file, a large one in parts; what the store then says of it."""
        from fsspec.callbacks import Callback

        piece = PIECE
        while path.stat().st_size > piece * MOST_PARTS:
            piece *= 2
        settings: dict[str, Any] = {"chunksize": piece}
        settings |= {"max_concurrency": AT_ONCE} if self.scheme == "s3" else {"consistency": "md5"}

        def send(files: Any) -> RemoteStamp:
            shown = Callback(hooks={"told": lambda size, value, **_: tell(value)})
            files.put_file(str(path), self.path(name), callback=shown, **settings)
            files.invalidate_cache()
            info = files.info(self.path(name))
            return RemoteStamp(int(info["size"]), tag_of(info))

        return self._tried(f"uploading {path.name} to {self.url}", send)

    def abort_unfinished(self, names: Iterable[str]) -> None:
        """The parts of uploads of these objects that were killed: they cannot be seen, and are paid for."""
        if self.scheme != "s3":  # gs:// forgets them
            return
        bucket, _, inside = self.path("").partition("/")
        keys = {inside + name for name in names}

        def abort(files: Any) -> None:
            listed = files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=inside)
            for one in listed.get("Uploads", []):
                if one["Key"] in keys:
                    files.call_s3("abort_multipart_upload", Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])

        try:
            self._tried(f"looking for unfinished uploads in {self.url}", abort)
        except CheckpointError:  # many may write and not list them; the bucket's own rules have to clean up
            return
