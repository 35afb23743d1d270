"""Training of recommendation models: sparse types, embedding collections, models, trainer."""
