"""Sources of rows of tokens: text as bytes, files of tokens, and the tokenizer that makes tokens of text."""
