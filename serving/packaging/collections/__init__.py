"""Modules that hold embedding tables: how they are found, and what stands in for them in a package.

One file per kind of module: `pooled` and `unpooled` are the two kinds of collections, `positions` and
`hashing` what may stand before them.  `find` lists the kinds.
"""
