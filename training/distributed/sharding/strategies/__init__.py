"""One file per sharding strategy; each registers one record, and `registry` finds the files."""
