"""`tessera evaluate`: how good packages and runs are on rows of a table, of a run's split, or of a format.

In the order of the work: `models` answer batches, `data` opens what they are evaluated on, `columns` keeps
what slices and errors need of it, `scoring` makes the pass, `results` turns its arrays to metrics,
`importance` shuffles columns, `report` and `page` write what was found.
"""
