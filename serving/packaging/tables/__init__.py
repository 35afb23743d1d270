"""The tables of a model as stored rows: their types, their places and their bytes."""
