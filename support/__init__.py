"""Helpers of the programs. Without this file another `support` on PYTHONPATH would go first."""

import sys

if sys.platform == "win32":
    sys.exit("STAPO runs on Linux and macOS; on Windows use WSL2. Its loss alone needs only torch.")
