"""The Ray that a run starts on this machine: which processes it has, and how they start."""
