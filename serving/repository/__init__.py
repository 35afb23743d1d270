"""A repository of models: folders of versions that come and go while requests are answered.

docs/repository.md is the specification.  Everything that decides is a pure function of what was read and
of a time that is handed in; only `folder` and `control` touch the file system.
"""
