"""The rows of one rank: shards, their lookup and their update."""
