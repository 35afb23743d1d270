"""Tables of the user's own: files of Parquet, CSV, JSON lines or Arrow, to batches.

In the order of the data: `files` finds them, `convert` makes Parquet of what is not, `parquet` cuts that
into units that are read at once, `settle` says what each column gives a batch, `index` holds what is
known of every row before training (its labels and its split), `decode` turns units into arrays, and
`view` cuts these into batches.
"""
