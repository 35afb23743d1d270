"""Clients of gRPC by others, and HTTP/2 clients, against both servers.

``python -m tests.peers`` runs those that are there: grpcio of this environment and of others (``--python``),
@grpc/grpc-js (``--node-modules``), KServe's Python client (``--kserve``), grpc-go, grpc-java, curl and h2load.  `test_peers` does so for what a machine has.
"""
