"""One module for each ``data.format``: what its section says, and how its data is opened.

Every module registers a `DataConfig`; nothing else imports them.
"""
