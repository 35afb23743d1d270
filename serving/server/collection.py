"""When Python looks for cycles among objects while a server answers."""

from __future__ import annotations

import gc

_COLLECT_OBJECTS = 5_000
"""New objects after which they are looked at for cycles.  gRPC makes two objects of each header of a call, up to half a
million of a hostile one, and by default every 700 of them were a reason to look.  It also leaves a cycle of five objects
for each call; ten times as many calls at once delayed others by 100 ms."""


def keep_what_is_loaded() -> None:
    """What is there now stays: it need not be looked at by every later collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_OBJECTS)
