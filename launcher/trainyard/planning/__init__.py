"""Planning and rendering: run file and platform -> plan -> RayJob. Pure: this room knows no cluster.

It also compares plans and objects (`diff`), checks capacity and quota, writes JSON Schemas and new run files.
"""
