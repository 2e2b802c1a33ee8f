"""Preparation of text for language models: tokenise it in chunks, and write rows of tokens.

`prepare_tokens` makes rows of chats, prompts or text, and `prepare_stream` cuts one long stream into rows.
Both tokenise by `token_chunks`, in the processes of `chunk_processes`. `open_shards` checks files that hold
tokens already, and `train_tokenizer` makes a tokenizer.
"""
