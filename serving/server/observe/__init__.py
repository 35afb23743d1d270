"""What is told of each call beside the counters: the access log."""
