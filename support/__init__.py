"""What all files here need: InputError, and the packages in the versions that are tested.

support/ has a subject to a file. None of its files imports one of the four at the top level.
"""

import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version  # of transformers


class InputError(ValueError):
    """Wrong input. The message identifies the flag, file or row and says what to do.

    A program ends with this message, one line, and no traceback.
    """


def installed() -> dict[str, str]:
    """Return the versions of Python and of the run-time packages: {name: version}."""
    packages = ("torch", "transformers", "datasets", "tqdm")
    return {"Python": platform.python_version()} | {name: version(name) for name in packages}


_FILE = Path(__file__).parent.with_name("requirements.txt")
# Before anything is imported that only newer versions have.
for _name, _least in re.findall(r"^(\w+)>=([\d.]+)", _FILE.read_text("utf-8"), re.MULTILINE):
    if Version(version(_name)) < Version(_least):
        sys.exit(f"{_name} {version(_name)} is too old: pip install -r requirements.txt")
