"""The arguments of the command-line tools, from which both launcher and trainer build their parsers."""
