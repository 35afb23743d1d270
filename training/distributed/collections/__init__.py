"""Sharded modules: pooled and unpooled collections, a single bag, feature processors."""
