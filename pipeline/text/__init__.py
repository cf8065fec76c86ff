"""Tokenizer and chat format: the only place where messages become token ids and back."""
