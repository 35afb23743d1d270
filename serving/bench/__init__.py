"""Scripts that measure the serving side, each beside a peer in the same run."""
