"""Final-answer extraction, equality of answers, and the +1 / -1 reward (Sec. 2.2, appendix)."""

import re
from fractions import Fraction

_RATIONAL = re.compile(
    r"(-?)(?:\\[dt]?frac\{(-?\d{1,400})\}\{(\d{1,400})\}|(\d{1,400})/(\d{1,400})|(\d{0,400}(?:\.\d{1,400})?))"
)


def extract_answer(response: str, *, answer_line: bool = False) -> str | None:
    """Content of the last complete \\boxed{...} or \\fbox{...}, or None.

    With `answer_line`, a last `Answer: ...` line counts where there is no box.
    """
    stack, best = [], None
    tail = response[-20000:]
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", tail, re.S):
        token = match.group()
        if token.startswith(("\\boxed", "\\fbox")):
            stack.append(match.end())
        elif token == "{":
            stack.append(-1)
        elif token == "}" and stack:
            start = stack.pop()
            if start >= 0 and (best is None or start > best[0]):
                best = (start, match.start())
    if best:
        return tail[best[0] : best[1]].strip()
    if answer_line:
        lines = re.findall(r"(?im)^\W*answer\s*:\s*(.+)$", tail)
        return lines[-1].strip() if lines else None
    return None


def math_equal(a: str, b: str) -> bool:
    """Whether two final answers, without boxes, are the same."""
    a, b = (re.sub(r"[\s$]|\\left|\\right|\\[,!;]", "", s) for s in (a, b))
    if a == b:
        return True
    values = []
    for text in (a, b):
        match = _RATIONAL.fullmatch(text)
        if not match or not any(match.groups()[1:]):
            return False
        sign, n, d, p, q, plain = match.groups()
        if int(d or q or 1) == 0:
            return False
        values.append((-1 if sign else 1) * Fraction(plain or n or p) / int(d or q or 1))
    return values[0] == values[1]


def is_correct(response: str, gold: str, *, answer_line: bool = False) -> bool:
    """Whether the last boxed answer of `response` equals `gold`."""
    answer = extract_answer(response, answer_line=answer_line)
    return answer is not None and math_equal(answer, extract_answer(gold) or gold)


def math_reward(response: str, gold: str, *, answer_line: bool = False) -> float:
    """+1.0 for a right final answer, -1.0 otherwise."""
    return 1.0 if is_correct(response, gold, answer_line=answer_line) else -1.0
