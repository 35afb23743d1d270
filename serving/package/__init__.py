"""The package file: its format, opening it, and running what is inside.

`FORMAT.md` beside this folder describes the file.
"""
