"""From the bytes of a request to checked arrays, and from scores to the bytes of a response."""
