"""From a trained checkpoint to answers over the network.

``packaging`` makes the one-file package, ``loading`` verifies and opens it, ``server`` answers
Predict calls with it, ``client`` makes such calls.  The input schema they share is in ``schema``.
"""
