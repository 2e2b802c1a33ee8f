"""The code that travels with a run: which files of a folder are packed, and from which git revision.

`code_files` selects the files by the rules that `gitignore` reads, `code_archive` packs them, and `source`
names the revision.
"""
