"""What is told of single calls beside the counters: the access log, and spans of those that are traced."""
