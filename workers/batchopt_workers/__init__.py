"""The worker's side of batchopt: all that a worker process loads, and what both sides must know.

`map` evaluates the chunks of a batch at X; `tasks` are the other functions of a batch that workers carry out; `data` is
how batches, modules and vectors lie in memory and travel; `process` is the life of a worker and of the process that
forks them. Read in this order: `process.messages` (what crosses the process boundary), `map.evaluate` (the map
function), `process.loop` (a worker's life). Nothing here imports `batchopt`.
"""
