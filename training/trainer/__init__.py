"""The trainer: loop, evaluation, checkpoints, logs and report of one run."""
