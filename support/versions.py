"""The installed versions of the run-time packages, and the tested ones: requirements.txt."""

import re
from importlib.metadata import version
from pathlib import Path

from packaging.specifiers import SpecifierSet

REQUIREMENTS = (Path(__file__).parent.parent / "requirements.txt").read_text("utf-8")
TESTED = dict(re.findall(r"^(\w+)([<>=][^#\s]*)", REQUIREMENTS, re.MULTILINE))  # {package: bounds}


def installed() -> dict[str, str]:
    """Return {package: version} of the run-time packages."""
    return {name: version(name) for name in TESTED}


def outside_the_bounds() -> list[str]:
    """Return a line for each package whose version is outside the bounds of requirements.txt."""
    return [
        f"{name} {found} is not a tested version (requirements.txt: {TESTED[name]})"
        for name, found in installed().items()
        if not SpecifierSet(TESTED[name]).contains(found, prereleases=True)
    ]
