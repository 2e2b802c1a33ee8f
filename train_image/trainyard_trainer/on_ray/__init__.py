"""The driver of an attempt on Ray, its callbacks, and the connection to Ray."""
