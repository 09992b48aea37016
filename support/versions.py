"""The installed versions of the run-time packages: each run keeps them in its config.json."""

from importlib.metadata import version


def installed() -> dict[str, str]:
    """Return {package: version}."""
    return {name: version(name) for name in ("torch", "transformers", "datasets", "tqdm")}
