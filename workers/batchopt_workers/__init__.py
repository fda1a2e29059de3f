"""The worker's side of batchopt: everything that a worker process loads, and what both sides must know.

`map` evaluates the chunks of a batch at X; `tasks` has the other functions of a batch that workers run; `data` defines
how batches, modules and vectors are laid out in memory and sent; `process` is the life of a worker and of the process
that forks workers. Read in this order: `process.messages` (what crosses the process boundary), `map.evaluate` (the map
function), `process.loop` (a worker's life). Nothing here imports `batchopt`.
"""
