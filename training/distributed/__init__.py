"""Model parallelism: tables fused with their optimizer, placed on ranks."""
