"""The errors that are the user's: a program ends with their message, one line, and no traceback."""


class InputError(ValueError):
    """Wrong input: the message names the flag, file or row and says what to do."""


class RewardError(InputError):
    """A reward of the user's own cannot be used: the message names it and says why."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
