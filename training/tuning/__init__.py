"""Search for settings: many runs of `tessera train`, of which Optuna chooses the next ones.

`space` says which keys are searched and between which values, `metric` what counts, `study` asks
Optuna and keeps what became of each trial, `child` runs one trial, `tuner` runs them all, and
`result` writes the best config, the table and the report.
"""
