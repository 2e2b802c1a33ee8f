"""The run file's section `data`: its kinds of sources (`sources`), and which of them can be streamed."""
