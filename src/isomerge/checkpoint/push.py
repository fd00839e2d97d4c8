"""Put a finished folder on the Hugging Face hub. Everything goes through huggingface_hub, so HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE are obeyed; nothing is written into the folder."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomerge.checkpoint.base import first_line
from isomerge.checkpoint.hub import looks_like_hub_id
from isomerge.choices import STAGING
from isomerge.errors import CheckpointError, RequestError

# Weights of an earlier push, sharded in another way, would be loaded in place of the new ones or beside them.
REPLACED = ["model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json"]
MESSAGE = "Upload a model merged with isomerge"
CARD = "README.md"


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


@dataclass(frozen=True)
class PushedTo:
    """Where a folder went: the address of the repository or of the pull request, and the branch that has it."""

    address: str
    branch: str | None


def upload(
    path: Path,
    repo_id: str,
    *,
    token: str,
    private: bool = True,
    revision: str | None = None,
    pull_request: bool = False,
    message: str | None = None,
    card: str | None = None,
    quiet: bool = False,
) -> PushedTo:
    """Upload a folder, which the caller has checked, as `repo_id` (org/name).

    The repository is made if there is none; `private` counts only then. `revision` is a branch, made if need be. A
    pull request leaves the repository as it is until somebody merges it. `card` becomes README.md where the repository
    has none. huggingface_hub shows its progress on a terminal, unless `quiet`.
    """
    from huggingface_hub import HfApi, constants

    api = HfApi(token=token)
    where: Any = {"repo_id": repo_id, "repo_type": "model"}
    try:
        with _bars(shown=not quiet and sys.stderr.isatty()):
            address = str(api.create_repo(repo_id, private=private, repo_type="model", exist_ok=True))
            if revision and revision != constants.DEFAULT_REVISION:
                api.create_branch(repo_id, branch=revision, repo_type="model", exist_ok=True)
            commit = api.upload_folder(
                **where, folder_path=path, revision=revision, delete_patterns=REPLACED, create_pr=pull_request,
                ignore_patterns=[f"{STAGING}/**", ".*"], commit_message=message or MESSAGE,
            )  # fmt: skip
            # The hub opens no pull request for files that it has.
            branch = (commit.pr_revision if pull_request else None) or revision
            if card is not None and CARD not in api.list_repo_files(**where, revision=branch):
                api.upload_file(
                    **where, path_or_fileobj=card.encode("utf-8"), path_in_repo=CARD, revision=branch,
                    commit_message="Add the model card",
                )  # fmt: skip
    except Exception as error:  # huggingface_hub, its HTTP client and the network each have their own classes
        act = f"While pushing {path} to {repo_id} ({api.endpoint})"
        raise CheckpointError(f"{act}: {_cause(error, repo_id)} {path} is unchanged.") from error
    return PushedTo(str(commit.pr_url or address) if pull_request else address, branch)


def collect(repositories: Mapping[str, str | None], owner: str, title: str, *, token: str, private: bool) -> str:
    """Put repositories, each with a note or None, into the owner's collection of that title, and return its address.

    The collection is made if there is none; what is in it stays.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        collection = api.create_collection(title, namespace=owner, private=private, exists_ok=True)
        for repo_id, note in repositories.items():
            api.add_collection_item(collection.slug, repo_id, "model", note=note, exists_ok=True)
    except Exception as error:
        act = f"While collecting {len(repositories)} models under '{title}' ({api.endpoint})"
        raise CheckpointError(f"{act}: {_cause(error, owner)} The models themselves are there.") from error
    return str(collection.url)


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
