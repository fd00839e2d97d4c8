"""The tokenizer of a GGUF file as the files that transformers reads, made by transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isomerge.checkpoint.memory import quiet_transformers
from isomerge.checkpoint.remote_code import remote_code_allowed


def write_beside(path: Path, config: Mapping[str, Any], folder: Path) -> None:
    """config.json, and the tokenizer where transformers can make it of the metadata."""
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    try:
        from transformers import AutoTokenizer

        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                str(path.parent), gguf_file=path.name, trust_remote_code=remote_code_allowed()
            )
            tokenizer.save_pretrained(str(folder))
    except Exception:  # no vocabulary in the metadata, or one of a kind that transformers does not know
        return
