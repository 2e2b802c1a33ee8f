"""The folder of a run: every path and record in it, and the lease that decides which attempt may write."""
