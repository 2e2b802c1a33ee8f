"""Chats, prompts with completions, and texts: read, tokenised, and packed into rows of equal length.

`chat_files` reads rows from files, `examples` recognises their layout, `tokenizer` makes tokens of them,
`answers` finds those that are learnt, `tool_calls` writes calls of tools as a template knows them, and
`packing` fills rows. Only `tokenizer` knows Transformers, by the module `tokenizer_folder` beside this
folder.
"""
