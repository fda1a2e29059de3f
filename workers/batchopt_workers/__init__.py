"""The worker's side of batchopt: all that a worker process loads, and what both sides must know.

Read in this order: `messages` (what crosses the process boundary), `evaluate` (the map function),
`loop` (a worker process's life). Nothing here imports `batchopt`.
"""
