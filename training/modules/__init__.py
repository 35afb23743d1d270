"""Building blocks of models: embedding collections, MLP, cross network, hashing."""
