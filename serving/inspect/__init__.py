"""Packages as people look at them: summaries, graphs and comparisons."""
