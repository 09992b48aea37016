"""The responses of an evaluation, in a file that survives an interruption at any moment."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support import distributed
from support.distributed import rank, world_size
from support.files import append_rows, read_lines, write_whole

TAIL = 2000  # characters of a response that stay in memory; the verifier reads these


class Key(NamedTuple):
    """The name of one response. Problems and samples are numbered from 0."""

    benchmark: str
    decoding: str
    problem: int
    sample: int


def key_of(row: dict) -> Key:
    """The key of a row, from its columns."""
    return Key(*(row[name] for name in Key._fields))


class Journal:
    """Rows by key. Each row is also a line of a .jsonl file, and is written when it is known.

    A row has a `fingerprint` of what it was made from. Rank 0 writes to samples.jsonl, and rank 3
    to samples.rank3.jsonl beside it. A crash loses at most the line that is being written.

    `rows` has the rows of all ranks at the last merge. Every rank keeps all of them in memory, so
    only the last TAIL characters of a response are there.
    """

    def __init__(self, path: Path):
        self.path = path
        self.merge()

    def file_of(self, rank: int | str) -> Path:
        return self.path.with_suffix(f".rank{rank}.jsonl") if rank else self.path

    def add(self, key: Key, row: dict) -> None:
        """Write a row. The next merge puts it into `rows`, where it replaces an older one."""
        append_rows(self.file_of(rank()), [key._asdict() | row])

    def share(self, fingerprints: dict[Key, str]) -> list[Key]:
        """Return this rank's part of the keys that have no row with this fingerprint yet."""
        stored = {key: row.get("fingerprint") for key, row in self.rows.items()}
        missing = [key for key in fingerprints if stored.get(key) != fingerprints[key]]
        return missing[rank() :: world_size()]

    def parts(self, size: int = 64) -> Iterator[list[dict]]:
        """Iterate over all whole rows in lists of `size`. Rank 0 reads them for every rank."""
        rows = (row for _, row in read_lines(self.path)) if rank() == 0 else iter(())
        while part := distributed.broadcast(list(itertools.islice(rows, size))):
            yield part

    def merge(self) -> None:
        """Merge the files of all ranks into one and read it. Every rank must call this."""
        rows: dict[Key, dict] = {}
        with distributed.raised_on_all():
            if rank() == 0:
                rows = self.merged()
        self.rows = distributed.broadcast(rows)

    def merged(self) -> dict[Key, dict]:
        """Write the rows of all files to one file, sorted and without torn lines; return them."""
        folder = self.path.parent
        others = {self.file_of(number) for number in range(1, world_size())}
        if True:
            folder.mkdir(parents=True, exist_ok=True)
            for file in others:  # A network's listing of another host's files can be a minute old.
                file.touch()
        for file in folder.glob(self.file_of("*").name):
            if file.stem.rpartition(".rank")[2].isdigit():  # no copy, such as samples.rank1.old
                others.add(file)
        rows: dict[Key, dict] = {}
        lines: dict[Key, str] = {}
        for file in [self.path, *others]:
            for line, row in read_lines(file):
                if "response" in row:
                    row["response"] = row["response"].strip()[-TAIL:]
                rows[key_of(row)], lines[key_of(row)] = row, line.decode() + "\n"
        write_whole(self.path, "".join(lines[key] for key in sorted(lines)))
        for file in others:
            file.unlink()
        return rows
