"""A fleet of servers behind one name: calls are shared, new servers get their share, restarts lose no call.

``python -m tests.rolling --server cpp`` shows it at length with the flags of deploy/kubernetes, `test_rolling` in seconds.
"""
