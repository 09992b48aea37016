"""The errors that are the user's: a program ends with their message, one line, and no traceback."""


class InputError(ValueError):
    """Wrong input. The message identifies the flag, file or row and says what to do."""


class RewardError(InputError):
    """A reward of your own cannot be used. The message identifies it and says why."""
