"""How long the tests wait for what must come."""

PATIENCE_S = 300
"""Seconds that a test waits for another process or thread.  Only what hangs takes so long: on two cores
that ten jobs share, a process that imports torch and does a second's work has taken over a minute."""
