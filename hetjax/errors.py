"""The one exception type for mistakes in what a person wrote."""


class UserError(ValueError):
    """A mistake in what a person wrote: what was given, what is allowed, how to fix it.

    The command line prints its text alone and exits with status 2.
    """
