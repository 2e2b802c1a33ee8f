"""Rules of Kubernetes for the pods of an object: their validation, and Pod Security."""
