"""Commits: what a package's version has learnt since, as a log of files beside it.

`serving/FORMAT.md`, "Commits", has the bytes; the fields stand in `tessera.serving.package.commit`.
"""
