"""What a config chooses by a word; apart so that reading a config does not load torch."""

from typing import Literal

DenseMissing = Literal["indicator", "zero"]
Hashing = Literal["none", "modulo", "murmur3"]
FeatureSide = Literal["user", "item", "context"]
OutOfRange = Literal["reject", "clamp", "hash"]
Pooling = Literal["sum", "mean"]
