"""The versions of a repository in a server that runs: loaded, published and retired under load."""
