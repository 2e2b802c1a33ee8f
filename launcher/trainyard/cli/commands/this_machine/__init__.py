"""Commands that work on this machine without a cluster."""
