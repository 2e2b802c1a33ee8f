"""One worker of a run: the training loop, the learner, the optimizers and the synchronisation of the workers.

The engine knows no kind of data and does not know Ray.
"""
