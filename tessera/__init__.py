"""Tessera: recommendation models from training to answers over the network.

The sub-packages follow the way of the data:

* ``tessera.training``: sparse types, embedding collections, models, the trainer.
* ``tessera.serving``: the packager and the Python server.
* ``tessera.kernels``: lookup operators and the libraries that hold them.

Importing ``tessera`` itself loads none of them, nor torch.

``__version__`` is that of the tag that git found, by way of ``_version.py``, which installing writes (docs/releasing.md).
"""

try:
    from tessera._version import __version__
except ImportError:  # a checkout that was never installed
    __version__ = "0.0"

__all__ = ["__version__"]
