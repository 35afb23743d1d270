"""Following the logs of commits: what was learnt since a version was packaged, put into it while it answers."""
