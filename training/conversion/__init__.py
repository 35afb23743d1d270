"""Checkpoints of TorchRec for Tessera, and the other way: what `tessera convert-checkpoint` does.

`content` says what a checkpoint holds, `layers` and `states` convert it, `sources` and `targets` read
and write files.
"""
