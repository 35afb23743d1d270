"""A whole model: its collections replaced by their sharded form, the rest replicated."""
