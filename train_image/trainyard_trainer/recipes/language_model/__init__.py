"""The recipe `language_model`: a transformer over bytes of text, its loss, and its part of the report."""
