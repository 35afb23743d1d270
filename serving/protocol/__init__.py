"""The protocols' messages, generated from ``protos/`` by ``make protos`` and never edited by hand.

`services` makes the classes of a gRPC service from what the messages' modules say of it.
"""
