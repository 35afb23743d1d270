"""Floods and faults against a running server, and what a polite client sees meanwhile.

``python -m tests.attack --address HOST:PORT --model-file MODEL.pt`` runs every flood against a server that is
there and prints a table; ``make attack`` starts both servers and does the same at length; ``make test`` runs each
flood for a moment (``test_floods.py``).

`wire` writes frames and header blocks by hand, `grpc_floods` and `http_floods` say what is sent, `pouring` sends
it from a process of its own, `watching` is the polite client and the look at the server's process.
"""
