"""Many runs of one run file: combinations, their course and their outcomes, on a cluster or here."""
