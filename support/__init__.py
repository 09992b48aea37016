"""Helpers of the four programs, which import from here. Nothing here imports one of the four."""

from importlib.metadata import version


class InputError(ValueError):
    """Wrong input. The message identifies the flag, file or row and says what to do.

    A program ends with this message, one line, and no traceback.
    """


def installed() -> dict[str, str]:
    """Return the installed versions of the run-time packages: {package: version}."""
    return {name: version(name) for name in ("torch", "transformers", "datasets", "tqdm")}
