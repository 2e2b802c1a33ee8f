"""How launcher and trainer start Python programs: isolated from the user's folders, or with them as the code.

`start` is the program that runs the others, `isolation` builds its command line, `code_imports` imports the
user's code, and `standard_streams` says what is done when nobody reads what a program prints.
"""
