"""Ranking models: DLRM, DLRM with a cross network, and the whole way from raw features."""
