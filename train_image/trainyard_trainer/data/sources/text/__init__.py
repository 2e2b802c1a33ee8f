"""Sources of text: files as bytes, files of tokens, and the tokenizer that makes tokens of text."""
