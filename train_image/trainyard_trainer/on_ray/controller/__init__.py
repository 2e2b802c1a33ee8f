"""What Ray Train's controller loads. Its process must start quickly, so nothing here imports torch.

The callbacks record failures, keep the workers' logs, and end or prepare restarts. `process_group` is the
trainer itself, whose workers alone import PyTorch.
"""
