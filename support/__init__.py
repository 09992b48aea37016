"""Helpers of the four programs, none of which they import. Read ranks.py first, then run.py."""

import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version  # of transformers


class InputError(ValueError):
    """Wrong input. The message identifies the flag, file or row and says what to do.

    A program ends with this message, one line, and no traceback.
    """


def check_least(cfg: Any, **least: int) -> None:
    """Raise InputError, naming the flag, if a flag is below its least value."""
    for name, value in least.items():
        if getattr(cfg, name) < value:
            raise InputError(f"--{name} {getattr(cfg, name)}: must be at least {value}")


def installed() -> dict[str, str]:
    """Return the versions of Python and of the run-time packages: {name: version}."""
    packages = ("torch", "transformers", "datasets", "tqdm")
    return {"Python": platform.python_version()} | {name: version(name) for name in packages}


_FILE = Path(__file__).parent.with_name("requirements.txt")
# Before anything is imported that only newer versions have.
for _name, _least in re.findall(r"^(\w+)>=([\d.]+)", _FILE.read_text("utf-8"), re.MULTILINE):
    if Version(version(_name)) < Version(_least):
        sys.exit(f"{_name} {version(_name)} is too old: pip install -r requirements.txt")
