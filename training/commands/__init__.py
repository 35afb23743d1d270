"""The sub-commands of `tessera` that train, or make what training reads."""
