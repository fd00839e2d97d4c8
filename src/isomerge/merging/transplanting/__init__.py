"""Tables of a model for another tokenizer: rows of known tokens stay, rows of new ones are made."""
