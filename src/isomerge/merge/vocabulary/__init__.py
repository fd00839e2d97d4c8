"""Tokenizers, vocabulary tables and chat templates of a merge. Tokens are matched by their strings, never by ids."""

from isomerge.merge.vocabulary.files import is_tokenizer_file
from isomerge.merge.vocabulary.merging import merge_vocabularies, vocabulary_problems
from isomerge.merge.vocabulary.rules import TokenRule, TokenSource
from isomerge.merge.vocabulary.templates import BUILT_IN, chat_template, write_chat_template
from isomerge.merge.vocabulary.vocabulary import Vocabulary

__all__ = [
    "BUILT_IN",
    "TokenRule",
    "TokenSource",
    "Vocabulary",
    "chat_template",
    "is_tokenizer_file",
    "merge_vocabularies",
    "vocabulary_problems",
    "write_chat_template",
]
