"""Sharding strategies, one record each, and the components that they are made of."""
