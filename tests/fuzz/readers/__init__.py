"""Every reader of files, called as the verbs reach it, with whole files to start from.

A reader is a function of a folder. Its seeds are good folders, made once by the code that people make such files with;
`damage` says which of their files are changed, and how.
"""

from fuzz.readers import checkpoints, data, formats, interrupted, outputs, recipes, studio, tokenizers, verbs, zoo  # noqa: F401  they register
from fuzz.readers.registry import READERS, Reader, Seed

WEIGHTS = {
    "table": 6, "safetensors": 5, "adapter": 5, "image": 5, "barrier": 4, "archive": 4, "merge": 4, "record": 4,
    "resume": 4, "config": 3, "transform": 3, "statistics": 3, "recipe": 3, "tokenizer": 3, "points": 2, "apply": 2,
    "preprocessor": 2, "index": 2, "bin": 2, "lock": 2, "page": 2, "card": 2, "solved": 2, "run": 4, "words": 3,
    "union": 3, "check": 3, "verify": 3, "reproduce": 3, "studio": 2, "request": 3,
    "description": 2, "gguf": 4, "block scales": 3, "pipeline": 3, "diffusion lora": 3,
}  # fmt: skip
"""How the time is shared: much to readers that every verb uses, and to those that take long."""

__all__ = ["READERS", "WEIGHTS", "Reader", "Seed"]
