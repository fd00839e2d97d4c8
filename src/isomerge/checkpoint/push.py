"""Put a finished folder on the Hugging Face hub. Everything goes through huggingface_hub, so HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE are obeyed; nothing is written into the folder."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isomerge.checkpoint.base import first_line
from isomerge.checkpoint.hub import looks_like_hub_id
from isomerge.checkpoint.local import open_folder
from isomerge.choices import STAGING
from isomerge.errors import CheckpointError, RequestError

# Weights of an earlier push, sharded in another way, would be loaded in place of the new ones or beside them.
REPLACED = ["model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json"]


def require_access(repo_id: str, token: str | None = None) -> str:
    """The token to push with. What can be known to fail without asking the hub fails here, before hours of work."""
    from huggingface_hub import constants, get_token

    act = f"While preparing to push to {repo_id}"
    if not looks_like_hub_id(repo_id):
        raise RequestError(f"{act}: '{repo_id}' is no name of a repository. Write it as org/name or user/name.")
    if constants.HF_HUB_OFFLINE:
        raise RequestError(f"{act}: HF_HUB_OFFLINE is set, so the hub must not be asked. Unset it to push.")
    token = token or get_token()
    if not token:
        raise RequestError(
            f"{act}: there is no token to push with. Log in with `hf auth login`, or set HF_TOKEN to a token that may "
            "write."
        )
    return token


def push(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    token: str | None = None,
    private: bool = True,
    revision: str | None = None,
    quiet: bool = False,
) -> str:
    """Upload the model in `folder` as `repo_id` (org/name) and return its address.

    The repository is made if there is none; `private` counts only then. `revision` is a branch, made if need be.
    huggingface_hub shows its progress on a terminal, unless `quiet`.
    """
    from huggingface_hub import HfApi, constants

    act = f"While pushing {folder} to {repo_id}"
    token = require_access(repo_id, token)
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise RequestError(f"{act}: there is no such folder. Name the folder of a model.")
    open_folder(path)  # an unfinished or damaged model is refused before the hub hears of it
    api = HfApi(token=token)
    try:
        with _bars(shown=not quiet and sys.stderr.isatty()):
            url = api.create_repo(repo_id, private=private, repo_type="model", exist_ok=True)
            if revision and revision != constants.DEFAULT_REVISION:
                api.create_branch(repo_id, branch=revision, repo_type="model", exist_ok=True)
            api.upload_folder(
                repo_id=repo_id, folder_path=path, repo_type="model", revision=revision, delete_patterns=REPLACED,
                ignore_patterns=[f"{STAGING}/**", ".*"], commit_message="Upload a model merged with isomerge",
            )  # fmt: skip
    except Exception as error:  # huggingface_hub, its HTTP client and the network each have their own classes
        raise CheckpointError(f"{act} ({api.endpoint}): {_cause(error, repo_id)} {path} is unchanged.") from error
    return str(url)


@contextlib.contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hide = not shown and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()


def _cause(error: BaseException, repo_id: str) -> str:
    """Why the hub said no, and the next step."""
    status = _status(error)
    owner = repo_id.split("/")[0]
    if status == 401:
        return "the hub does not know this token (401). Make a new one in its settings, then `hf auth login`."
    if status == 403:
        return (
            f"this token may not write to '{owner}' (403). Use a token with write permission, or a name under "
            "your own account."
        )
    if status in (404, 409):
        return (
            f"there is no model repository of that name to write to ({status}); the name may belong to a dataset or a "
            "Space. Choose another name."
        )
    return f"{first_line(error)}. Check the network, then push again: what has arrived is not sent twice."


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error, which may be wrapped in another."""
    while error is not None:
        status: Any = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return int(status)
        error = error.__cause__ or error.__context__
    return None
