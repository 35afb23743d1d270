"""Small functions for code that is also traced, under the path of ``torchrec.fx.utils``."""

from __future__ import annotations

from tessera.training.fx.tracer import is_fx_tracing


def assert_fx_safe(condition: bool, message: str) -> None:  # noqa: FBT001 - the signature that TorchRec users know
    """Check a condition in code that runs; while it is traced, a condition has no value yet.

    Raises:
        AssertionError: the condition does not hold; the text is ``message``.
    """
    if not is_fx_tracing() and not condition:
        raise AssertionError(message)
