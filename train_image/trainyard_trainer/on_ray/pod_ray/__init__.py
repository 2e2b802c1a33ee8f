"""The Ray that KubeRay starts in the pods of our image: what it leaves out, and how its workers start."""
