"""The sub-commands of `tessera` that package, serve and predict."""
