"""Problems and their right answers, from the Hub or a file, in the layouts of usual data sets."""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

from support import InputError
from support.grader.compare import MAX_CHARS, clean
from support.progress import one_line, say, track

PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer", "reward_model")
QUESTION_PARTS = ("choices", "options")  # columns that no prompt would have
READ = f"a problem is text or a chat of user and assistant, in {' or '.join(PROBLEM_COLUMNS)}; "
READ += "an answer is text, a number below 2^53 (float32: 2^24) or a flat list (as text: a list of "
READ += f'one text), in {" or ".join(ANSWER_COLUMNS)} (with pandas: orient="records")'
# DAPO-Math-17k wraps each problem in its own instruction, which asks for another answer format.
DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_AFTER = 'Remember to put your answer on its own line after "Answer:".'


def load_problems(
    source: str,
    split: str = "train",
    *,
    whole_rows: bool = False,
    unbox: Callable[[str], str] = lambda answer: answer,
) -> list[dict[str, Any]]:
    """The distinct problems of a Hub data set or a .jsonl, .json or .parquet file, in their order.

    The problem is the column `problem`, `question` or `prompt`: text or a chat. The answer is
    `answer`, `final_answer` or `reward_model["ground_truth"]`. The first that is not empty counts,
    but `final_answer` goes before an `answer` with several lines or more than 60 characters.
    source: a file, or ID, ID:CONFIG or ID:CONFIG:SPLIT of a Hub data set; split: without a SPLIT.
    unbox: the reward's, which finds the answer in a box. Returns [{"problem": str, "answer": str}].

    Rows without an answer are left out, and so are rows with the problem and the answer of an
    earlier row. A line says how many. With `whole_rows` each problem has its "row" too, a dict of
    every column. Then only rows that repeat a whole row, but for its number, are left out. A line
    says which columns were read, and shows the first problem. Raises InputError.
    """
    problems: dict[tuple, dict[str, Any]] = {}  # DAPO-Math-17k holds each problem ~100 times
    total = without_answer = 0
    columns, read = {}, set()  # of all rows, in their order; of problems and answers
    for total, row in enumerate(load_rows(source, split), start=1):
        try:
            problem, answer, used = read_row(row, whole_rows)
        except ValueError as error:
            raise InputError(f"{source}: row {total} {error}") from error
        columns |= row
        read.update(used)
        if answer or whole_rows:
            own = {"row": row} if whole_rows else {}
            key = (problem, answer, repr(without_numbers(own)))
            problems.setdefault(key, {"problem": problem, "answer": answer} | own)
        else:
            without_answer += 1
    if not problems:
        raise InputError(f"{source}: holds no problem with an answer; {READ}")
    if without_answer:
        say(f"{source}: rows without an answer (empty, proof, notfound) left out: {without_answer}")
    if repeated := total - without_answer - len(problems):
        say(f"{source}: rows that repeat an earlier row left out: {repeated}")
    found = list(problems.values())
    rest = "for the reward alone: " if whole_rows else "not read: "
    rest += ", ".join(name for name in columns if name not in read) or "none"
    rest = one_line(rest, 300)
    gold = unbox(found[0]["answer"])
    gold = gold if whole_rows or len(gold) > MAX_CHARS else clean(gold)
    reader = "" if whole_rows else ", as the grader reads it"
    say(
        f"{source}: read from {', '.join(name for name in columns if name in read)}; {rest}; "
        f'first problem: "{one_line(found[0]["problem"])}"; its answer{reader}: "{one_line(gold)}"'
    )
    long = [each["answer"] for each in found if len(each["answer"]) > MAX_CHARS]
    too_long = sum(len(unbox(answer)) > MAX_CHARS for answer in long)
    if too_long and not whole_rows:
        what = f"of more than {MAX_CHARS} characters, which a box must repeat to be right"
        say(f"{source}: answers {what}: {too_long}")
    return found


def without_numbers(value: Any) -> Any:
    """A row without the numbers that data sets (DAPO-Math-17k) and pandas give to each row."""
    if not isinstance(value, dict):
        return value
    numbers = re.compile("index|id|uuid|__index_level_.*")
    return {k: without_numbers(x) for k, x in value.items() if not numbers.fullmatch(k)}


def read_row(row: Any, whole_rows: bool) -> tuple[str, str, list[str]]:
    """Return the problem and the answer of a row, and their columns.

    Raises ValueError that says what is wrong.
    """
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    texts = {name: problem_text(row[name]) for name in PROBLEM_COLUMNS if name in row}
    # None: of no kind that is read. "": the row says that there is no answer.
    answers = {name: answer_text(row[name]) for name in ANSWER_COLUMNS if name in row}
    in_column = next(filter(texts.get, texts), "")
    of_column = next(filter(answers.get, answers), "")
    if of_column == "answer" and answers.get("final_answer"):
        solution = len(answers["answer"]) > 60 or "\n" in answers["answer"]
        of_column = "final_answer" if solution else "answer"
    problem, answer = texts.get(in_column, ""), answers.get(of_column, "")
    if not problem or (None in answers.values() and not answer and not whole_rows):
        columns = ", ".join(list(row)[:9])
        kinds = ", ".join(f"{name} is {type(row[name]).__name__}" for name in texts | answers)
        kinds = kinds and f" ({kinds})"
        raise ValueError(f"has no problem or no answer in its columns {columns}; {READ}{kinds}")
    for name in QUESTION_PARTS:
        if any(text not in problem for text in texts_in(row.get(name))):
            raise ValueError(f"has {name} outside its problem: write them into it, or rename them")
    if re.search(r"[\ud800-\udfff]", problem + answer):
        raise ValueError("has half of a character, \\ud800 to \\udfff, which no file can hold")
    # In JSON, \frac without a second backslash is a form feed, and \theta begins with a tab.
    if not whole_rows and (odd := re.search(r"[\0-\x08\x0b\x0c\x0e-\x1f]|[\t\r][a-z]", answer)):
        what = f"has the character {odd[0][0]!r} in its answer"
        raise ValueError(rf"{what}; in JSON, LaTeX has two backslashes: \\frac")
    return problem, answer, [in_column, of_column]


def load_rows(source: str, split: str) -> Iterator[dict]:
    """Iterate over the rows of a Hub data set or a local file, with a bar. Raises InputError."""
    import datasets  # slow to import, and needed by no other function
    from pyarrow.parquet import ParquetFile  # of datasets

    file = Path(source)
    kind = file.suffix.lower()
    try:
        if kind in (".jsonl", ".json"):
            rows = json_rows(file)
        else:
            if kind == ".parquet":
                table = ParquetFile(file)
                schema = table.schema_arrow
                batches = (batch.to_pydict() for batch in table.iter_batches(1000))
            elif file.is_file():
                raise ValueError(f"{kind} is no kind of file that is read")
            else:
                name, config, own_split = [*source.split(":", 2), "", ""][:3]
                hub = datasets.load_dataset(name, config or None, split=own_split or split)
                schema, batches = hub.features.arrow_schema, hub.iter(1000)
            # A batch is {column: values}.
            rows = (dict(zip(batch, row)) for batch in batches for row in zip(*batch.values()))
            stored = json.loads((schema.metadata or {}).get(b"huggingface", "{}"))
            features = stored.get("info", {}).get("features", {})
            types = {field.name: (field.type, features.get(field.name)) for field in schema}
            types = {name: x for name, x in types.items() if re.search("float|ClassLabel", str(x))}
            rows = (row | {name: meant(row[name], *types[name]) for name in types} for row in rows)
        yield from track(rows, f"reading {source}")
    except Exception as error:  # datasets raises a dozen unrelated kinds
        reason = shorten(str(error), 700)
        hint = "give a .jsonl, .json or .parquet file, or a Hub id, ID:CONFIG or ID:CONFIG:SPLIT"
        raise InputError(f"{source}: cannot be read as a dataset ({reason}); {hint}") from error


def json_rows(file: Path) -> Iterator[dict]:
    """Iterate over the rows of a file with a JSON object in each line, or with a list of objects.

    A text in a row stays a text. `datasets` would make a date of "2024-05-01". Raises ValueError.
    """
    with file.open(encoding="utf-8-sig") as lines:
        is_list = next(filter(str.strip, lines), "").lstrip().startswith("[")
        lines.seek(0)
        for number, text in enumerate([lines.read()] if is_list else lines, start=1):
            try:
                rows = json.loads(text) if text.strip() else []
            except json.JSONDecodeError as error:
                line = number + error.lineno - 1
                raise ValueError(f"line {line} is not JSON: {error.msg}") from error
            yield from rows if isinstance(rows, list) else [rows]


class LostDigits(float):
    """A number that a table may have rounded. It is no answer."""


def meant(value: Any, kind: Any, feature: Any) -> Any:
    """A cell of a table as it was meant: 0.1 for a float32's 0.10000000149, a class by its name.

    kind: the column's type in pyarrow; feature: how `datasets` describes it in a schema, or None.
    From 2^24 on float32 has lost digits, and from 2^11 on float16: LostDigits.
    """
    feature = feature if isinstance(feature, dict) else {}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [meant(item, kind.value_type, feature.get("feature")) for item in value]
    if isinstance(value, dict) and hasattr(kind, "field"):
        return {key: meant(x, kind.field(key).type, feature.get(key)) for key, x in value.items()}
    if isinstance(value, int) and feature.get("_type") == "ClassLabel":
        return feature["names"][value] if value >= 0 else None  # -1: no label
    if isinstance(value, float) and kind.bit_width < 64:
        if math.inf > abs(value) >= 2 ** {16: 11, 32: 24}[kind.bit_width]:
            return LostDigits(value)
        return float(str(kind.to_pandas_dtype()(value)))  # numpy writes the shortest text
    return value


def texts_in(value: Any) -> list[str]:
    """The texts and numbers of a cell, also of one that nests them: {"A": "red", "B": "blue"}."""
    if isinstance(value, (list, dict)):
        parts = value.values() if isinstance(value, dict) else value
        return [text for part in parts for text in texts_in(part)]
    return [] if value is None else [str(value).strip()]


def problem_text(value: Any) -> str:
    """Text; of a chat the user's last turn, or "" if others than an assistant speak.

    DAPO-Math-17k's wrapper is taken off, also in a copy with plain text. A number is the problem's
    number, so it gives "".
    """
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        last_turns = {turn.get("role") or "user": turn.get("content") for turn in value}
        value = last_turns.get("user") if last_turns.keys() <= {"user", "assistant"} else None
    text = value.strip() if isinstance(value, str) else ""
    if text.startswith(DAPO_BEFORE) and text.endswith(DAPO_AFTER):
        text = text[len(DAPO_BEFORE) : -len(DAPO_AFTER)].strip()
    return text


def answer_text(value: Any) -> str | None:
    """A right answer as text: text, a number, or a flat list of these, joined by commas.

    GSM8K has its work before the answer: `... #### 72` is 72. None is "", and so are NuminaMath's
    `proof` and `notfound`. Of an object its "ground_truth" counts. Skywork-OR1 has lists as text:
    `["72"]` is 72. A text that is a list of several texts gives None, and so does anything else.
    Tables can store 72 as 72.0, which gives "72". From 2^53 on floats have lost digits: None. Of
    other types it is LostDigits that gives None.
    """
    if isinstance(value, dict):
        value = value.get("ground_truth", value)
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):  # an interval, not JSON
            items = json.loads(value)
            if items and all(isinstance(item, str) for item in items):
                value = items[0] if len(items) == 1 else {}
    texts = []
    for item in value if isinstance(value, list) else [value]:
        if type(item) is float and abs(item) < 2**53:  # neither infinite nor NaN
            texts.append(str(int(item) if item.is_integer() else item))
        elif type(item) in (str, int):
            texts.append(str(item))
        elif value is not None:
            return None
    text = ", ".join(filter(None, texts)).rpartition("####")[2]
    # read_row must see a form feed at the start, which is "\frac".
    return "" if text.strip().lower() in ("", "proof", "notfound") else text.rstrip().lstrip(" \n")
