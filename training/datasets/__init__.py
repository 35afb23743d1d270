"""Streams of samples under TorchRec's paths: Criteo, MovieLens and random batches.

`tessera.training.data` is the library's own way from files to batches: prepared once, shuffled, split
and with errors of its own.  Here is what programs written for TorchRec import.  Both give the same
`Batch`, and Criteo's text has one parser.
"""

from tessera.training.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
