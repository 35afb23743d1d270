"""Load for a running server: programs that are started by their path, and that tests import."""
