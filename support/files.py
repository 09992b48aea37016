"""Files that a program writes and reads again: lines of JSON, whole files, fingerprints."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_lines(file: Path) -> Iterator[tuple[bytes, dict]]:
    """Iterate over (line, row) of a .jsonl file, without torn lines. The file may be missing."""
    for line in file.read_bytes().split(b"\n") if file.exists() else []:
        with contextlib.suppress(ValueError):
            yield line, json.loads(line)


def append_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Add lines to a .jsonl file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_whole(file: Path, text: str) -> None:
    """Write a file. A crash or a full disk leaves either the old text or the new one."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, "utf-8")
    sync(partial)
    partial.replace(file)


def sync(file: Path) -> None:
    """Wait until a file is on the disk."""
    with file.open("rb") as content:
        os.fsync(content)


def fingerprint(value: Any) -> str:
    """Hash a value: 16 hexadecimal digits of the SHA-256 of its JSON."""
    text = json.dumps(value, sort_keys=True, default=str)  # str: for dates and bytes
    return hashlib.sha256(text.encode()).hexdigest()[:16]
