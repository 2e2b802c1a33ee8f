"""Commands that submit, control and diagnose runs on a cluster."""
