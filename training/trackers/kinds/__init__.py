"""One module for each tracker that a config can name; each registers itself."""
