"""What a rule and a stage are. `python -m support.grader` prints the table of all kinds."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Rule:
    """One thing that the grader knows: how to read something, or when two answers are equal.

    row: examples `answer` for `right answer`. Before " | " are those that count because of this
    rule. Behind it are similar ones that do not count. tests/test_reward.py runs them.
    apply: a function of a few lines, with the arguments of the rule's stage. shown: whether the
    rule is a row of the table in docs/reference.md.
    """

    name: str
    row: str
    apply: Callable | None = None
    shown: bool = False

    def examples(self) -> list[tuple[str, str, bool]]:
        """Return (answer, right answer, whether it counts) for each example."""
        cells = zip(self.row.split(" | "), (True, False), strict=True)
        found = [(re.findall("`([^`]+)` for `([^`]+)`", cell), counts) for cell, counts in cells]
        return [(*pair, counts) for pairs, counts in found for pair in pairs]


kind = functools.partial(Rule, shown=True)  # a rule that the table shows


@dataclass(eq=False)
class Stage:
    """One step on the way of an answer. after: what is true behind it."""

    name: str
    after: str
    rules: list[Rule] = field(default_factory=list)

    def rule(self, name: str, shown: bool = False) -> Callable:
        """Return a decorator. It adds a function, whose docstring is the row, as the last rule."""

        def add(function: Callable) -> Callable:
            self.rules.append(Rule(name, " ".join(function.__doc__.split()), function, shown))
            return function

        return add

    def kind(self, name: str) -> Callable:
        return self.rule(name, shown=True)

    def accepts(self, answer, right) -> bool:
        return any(rule.apply(answer, right) for rule in self.rules)


def sub(*pairs) -> Callable[[str], str]:
    """Return a function that replaces patterns in a text: pattern, new text, pattern, new text ...

    ~ in a pattern is the end of a command's name.
    """
    steps = [re.compile(pattern.replace("~", "(?![A-Za-z])")) for pattern in pairs[::2]]

    def apply(text: str) -> str:
        for step, new in zip(steps, pairs[1::2]):
            text = " ".join(step.sub(new, text).split())
        return text

    return apply
