"""The rules that KubeRay objects must obey, and the check of any RayJob or RayCluster by them. Pure."""
