"""The warm process of this machine, as a command uses it: start a run in it, start it, end it.

The process itself is `trainyard_trainer.on_ray.warm`.
"""
