"""The numbers of a run: how far it has come, how fast it is, and where its time went.

`metrics` is the table of all metrics. `progress` writes them as lines of the run's folder, `tensorboard` as
curves. `startup` and `goodput` measure the time that did not go into steps.
"""
