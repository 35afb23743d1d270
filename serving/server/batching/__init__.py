"""From checked requests to scores: queue, policy, merge, forward pass, split."""
