"""Planning: turn a run file and a platform into a plan, and a plan into a RayJob. This room knows no cluster.

`objects` is the entry: it plans (`plan`, `requirements`, `trainer_input`, `sizing/`) and renders (`render`,
`merge`). `reasons` explains a plan. `nodes/` says which nodes pods may use, `capacity/` checks whether a run
fits, `comparison/` compares plans and platforms, and `authoring/` writes new run files and JSON Schemas.
"""
