"""Texts that the model writes: continued prompts, sampled generations, and answers that are compared."""
