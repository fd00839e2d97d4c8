"""Tokenizers, vocabulary tables and chat templates of a merge. Tokens are matched by their strings, never by ids."""

from isomerge.merging.vocabulary.files import is_tokenizer_file
from isomerge.merging.vocabulary.merging import merge_vocabularies
from isomerge.merging.vocabulary.rules import TokenRule, TokenSource
from isomerge.merging.vocabulary.templates import BUILT_IN, chat_template, write_chat_template
from isomerge.merging.vocabulary.vocabulary import Vocabulary

__all__ = [
    "BUILT_IN",
    "TokenRule",
    "TokenSource",
    "Vocabulary",
    "chat_template",
    "is_tokenizer_file",
    "merge_vocabularies",
    "write_chat_template",
]
