"""Whether a language model fits the memory of the GPUs, known before the run starts.

`model_shape` reads the sizes of the model, `model_memory` estimates what a worker needs for it, and
`memory_check` compares that with the GPUs of the run and says what would fit.
"""
