"""Every key of a training config, described from the dataclasses that read it.

`collect` walks the dataclasses and their docstrings, `terminal` prints what was found and
`markdown` makes docs/config.md of it.
"""
