"""Chats, prompts with completions, and texts: read, tokenised, and packed into rows of equal length.

`chat_files` reads rows from files, `examples` recognises their layout, `tokenizer` makes tokens of them and
finds those that are learnt, and `packing` fills rows. Only `tokenizer` knows
Transformers, by the module `tokenizer_folder` beside this folder.
"""
