"""Which texts are the URL of a model, and how a URL is kept free of secrets."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from isomerge.errors import RequestError
from isomerge.text import without_secrets

SCHEMES = ("s3", "gs", "hf", "http", "https")
WRITABLE = ("s3", "gs")
# One slash is what a Path leaves of two.
ADDRESS = re.compile(rf"({'|'.join(SCHEMES)}):/{{1,2}}(?=[^/])", re.IGNORECASE)
UNUSABLE = re.compile(r"[\s\\\x00-\x1f\x7f]|::|/\.\.?(/|$)")


def is_url(given: object) -> bool:
    """
    >>> is_url("s3://bucket/model"), is_url("org/name"), is_url("file:///etc")
    (True, False, False)
    """
    return isinstance(given, (str, os.PathLike)) and ADDRESS.match(str(os.fspath(given))) is not None


def usable_url(given: str | os.PathLike[str], act: str) -> str:
    """The URL without a slash at its end; an error if it carries a password, a signature or what no store can name.

    A URL is written into records, cards and lock files. So secrets are refused in it, and not only hidden.

    >>> usable_url("S3://bucket/model/", "opening")
    's3://bucket/model'
    """
    text = os.fspath(given)
    match = ADDRESS.match(text)
    if match is None:
        raise RequestError(f"While {act} {text}: this is no address that begins with {', '.join(SCHEMES)}.")
    url = f"{match[1].lower()}://{text[match.end() :]}"
    shown = without_secrets(url)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise RequestError(f"While {act} {shown}: this is no address ({error}). Check it.") from None
    if "@" in parts.netloc or parts.query or parts.fragment or "?" in url:
        raise RequestError(
            f"While {act} {shown}: the address has a name, a password, a query or a signature in it, and addresses are "
            "written into records. Leave it out, and put the credentials where the store's own tools look for them "
            "(docs/remote.md)."
        )
    if not parts.netloc or UNUSABLE.search(url):
        raise RequestError(f"While {act} {shown}: this is no address of a folder or file. Check its spelling.")
    return url.rstrip("/")


def scheme_of(url: str) -> str:
    return url.partition("://")[0]


def require_no_secrets(text: str, act: str) -> None:
    """Refuse a reference with secrets before it is taken apart at its @ and +."""
    for part in re.split(r"\+(?=\w+:/)", text):
        if ADDRESS.match(part) and without_secrets(part) != part:
            usable_url(part, act)
