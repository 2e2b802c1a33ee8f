"""What `trainyard train` and the warm process on the same machine must both know: the folder, the messages,
and the facts that must be the same. `on_ray.warm` is the process, `trainyard.local.warm` its client."""
