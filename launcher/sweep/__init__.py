"""Many runs of one run file. Nothing in it knows a cluster or the time: `launcher.commands.sweep` does."""
