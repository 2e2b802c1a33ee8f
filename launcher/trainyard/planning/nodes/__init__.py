"""The nodes that pods may use: `placement` joins what the pools of a run ask for, `affinity` reads labels."""
