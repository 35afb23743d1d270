"""Pools over ranks: rows that programs write and read by number, cut into blocks of rows.

A pool of `tessera.training.modules.tensor_pool` or `tessera.training.modules.keyed_jagged_tensor_pool` becomes one
of which each rank holds a block.  Every rank reads and writes rows of its own choice, all ranks at once:

* Row-wise: rank ``r`` holds rows ``r * ceil(R / W)`` and on, of ``R`` rows and ``W`` ranks.  Ids travel to the ranks that
  hold their rows, and the rows travel back.
* Replicated row-wise: each node holds all rows, cut over its own ranks.  Reading stays within a node; what is
  written goes to the rank of every node that holds the row.
* For inference: one process holds the blocks of all devices, and no process group is needed.

Of an id that several ranks write at once the highest rank's value counts, and of one that a rank writes several times
its last, so all copies of a row are always equal.
"""
