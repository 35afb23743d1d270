"""Packages and runs over whole files, without a server: scores, evaluations and embeddings."""
