"""Errors that are the user's to mend."""


class UserError(ValueError):
    """A flag, path, config value or input file that the user must change.

    The message names the field, the value and the remedy.  The command line prints it
    as one line and ends with exit status 2; libraries raise it (or a subclass) instead
    of a bare ``ValueError`` where the cause is outside the code.
    """
