"""Tessera: recommendation models from training to answers over the network.

The sub-packages follow the way of the data:

* ``tessera.training``: sparse types, embedding collections, models, the trainer.
* ``tessera.serving``: the packager and the Python server.
* ``tessera.kernels``: lookup operators and the libraries that hold them.

Importing ``tessera`` itself loads none of them, nor torch.
"""

__version__ = "0.1.0"
