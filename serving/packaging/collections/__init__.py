"""Modules that hold embedding tables: how they are found, and what stands in for them in a package.

`packed` has the two kinds of collections, `quantized` their quantized forms; `positions` and `hashing`
are what may stand before them.  `find` lists the kinds.
"""
