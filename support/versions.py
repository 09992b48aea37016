"""The installed versions of the run-time packages, and the tested ones: requirements.txt."""

import re
from importlib.metadata import version
from pathlib import Path

from packaging.specifiers import SpecifierSet

PACKAGES = ("torch", "transformers", "datasets", "tqdm")


def installed() -> dict[str, str]:
    """Return {package: version} of the run-time packages."""
    return {name: version(name) for name in PACKAGES}


def outside_the_bounds() -> list[str]:
    """Return a line for each package whose version is outside the bounds of requirements.txt."""
    text = (Path(__file__).parent.parent / "requirements.txt").read_text("utf-8")
    bounds = dict(re.findall(r"^(\w+)([<>=][^#\s]*)", text, re.MULTILINE))
    return [
        f"{name} {found} is not a tested version (requirements.txt: {bounds[name]})"
        for name, found in installed().items()
        if name in bounds and not SpecifierSet(bounds[name]).contains(found, prereleases=True)
    ]
