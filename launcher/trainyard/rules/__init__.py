"""Validate RayJobs and RayClusters against the rules of the API server, KubeRay, Kubernetes and the queue
systems. Pure."""
