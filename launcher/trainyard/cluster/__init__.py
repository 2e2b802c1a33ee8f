"""The only room that talks to Kubernetes: objects, logs, commands in pods, port-forwards, KubeRay's objects.

Objects are parsed dictionaries, in and out. No exception of the Kubernetes client leaves this room.
"""
