r"""Print the table of docs/reference.md, or what the rules of reading make of an answer.

python -m support.grader
python -m support.grader '5\frac12 \text{ cm}'
"""

import sys

from support.grader import STAGES
from support.grader.compare import TEXT_STAGES, clean, readings


def table() -> str:
    """Return the Markdown table of all rules that are shown: first those of numbers and words."""
    first = ["grammar", "rounding", "answers", "words"]
    stages = sorted(STAGES, key=lambda stage: [*first, stage.name].index(stage.name))
    rules = [rule for stage in stages for rule in stage.rules if rule.shown]
    lines = ["| kind | counts | does not count |", "|---|---|---|"]
    return "\n".join(lines + [f"| {rule.name} | {rule.row} |" for rule in rules])


def trace(text: str) -> None:
    """Print each rule that changes a text, the text behind it, and the tokens at the end."""
    tokens = [" ".join(reading) for reading in readings(clean(text))]
    for stage in TEXT_STAGES:
        for rule in stage.rules:
            before, text = text, rule.apply(text)
            if text != before:
                print(f"{stage.name}, {rule.name}: {text}")
    print("tokens:", " | ".join(tokens))


if __name__ == "__main__":
    trace(sys.argv[1]) if sys.argv[1:] else print(table())
