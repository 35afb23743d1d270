"""From a trained checkpoint to answers over the network.

``packaging`` makes the one-file package, ``loading`` verifies and opens it, ``server`` answers
Predict calls with it, ``client`` makes such calls.  The input schema they share is in ``schema``.

`package_model` packages a module of your own; `ModelInputs` and `FeatureRule` say how its inputs are
treated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.serving.packaging.inputs import FeatureRule, ModelInputs
    from tessera.serving.packaging.package import package_model

__all__ = ["FeatureRule", "ModelInputs", "package_model"]

_HOMES = {
    "FeatureRule": "tessera.serving.packaging.inputs",
    "ModelInputs": "tessera.serving.packaging.inputs",
    "package_model": "tessera.serving.packaging.package",
}


def __getattr__(name: str) -> Any:
    # The packager needs torch, which a client does without.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - only here

    return getattr(importlib.import_module(_HOMES[name]), name)
