"""The recipe `causal_lm`: fine-tuning of language models of Transformers, with or without an adapter."""
