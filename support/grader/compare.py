"""Two answers are compared: as letters of a choice, expressions, texts and rounded numbers.

A docstring below a rule's name has its examples (see Rule.row).
"""

import contextlib
import functools
import itertools
import re
from fractions import Fraction

from support.grader.forms import FAILURES, Form, bare, close, same
from support.grader.latex import NOTATIONS, SIGNS
from support.grader.rules import Stage
from support.grader.values import Reader, tokenize
from support.grader.words import WORDS

MAX_CHARS = 600  # the longest gold answer has 210
TEXT_STAGES = [SIGNS, WORDS, NOTATIONS]
Tokens = tuple[str, ...]


def clean(text: str) -> str:
    """Return `text` in one spelling: without units and layout."""
    for stage in TEXT_STAGES:
        for rule in stage.rules:
            text = rule.apply(text)
    return text.strip(" =:,")


CHOICES = Stage("choices", "A letter of a multiple choice has been compared.")
READINGS = Stage("readings", "An answer has one list of tokens for each way to read it.")
EXPRESSIONS = Stage("expressions", "Two readings are equal if one rule says so.")
ANSWERS = Stage("answers", "Two cleaned answers are equal if one rule says so.")
ROUNDING = Stage("rounding", "A number may have more digits than a measured right answer.")


def readings(text: str) -> list[Tokens]:
    """Return the tokens of a cleaned answer, for each way to read it."""
    tokens = tokenize(text)
    others = [rule.apply(text, tokens) for rule in READINGS.rules]
    return list(dict.fromkeys(map(tuple, [tokens, *filter(None, others)])))


@READINGS.rule("commas of thousands")
def _without_commas(text, tokens):
    """`100,200` for `100200` | `(1,234)` for `1234`"""
    if not re.search(r"[(\[{][^)\]}]*,", text):
        return tokenize(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))


@READINGS.kind("bound names; x(t), I(0)")
def _with_bound_names(text, tokens):
    r"""`f(x)=x` for `f(z)=z`, `x=1+n\pi` for `x=1+k\pi`, `x'+x=0` for `x'(t)+x(t)=0`,
    `I_0` for `I(0)` | `g(x)=x` for `f(x)=x`, `f(t)=t` for `f(x)=x`, `\varphi` for `\phi`"""
    # The name of a function's argument, or of any whole number: f(z) = z, x = 1 + \pi k.
    bound = r"\b[A-Za-z] \( ([a-z]) \) =|[+=](?: 2)? (?:pi ([k-n])|([k-n]) pi)(?= ,|\Z)"
    bound = {*itertools.chain(*re.findall(bound, " ".join(tokens)))} - {""}
    if len(bound) == 1:
        return ["bound" if token in bound else token for token in tokens]


@functools.lru_cache(maxsize=16)
def _values(tokens: Tokens, fixed: bool = False) -> list:
    """Return the value of an answer at three points. fixed: only derivatives differ there."""
    if len(tokens) > MAX_CHARS:
        raise ValueError("signs that stand for several tokens")
    return [Reader(tokens, point, fixed).answer() for point in range(3)]


def _families(tokens: Tokens) -> list[Form]:
    """Return an answer, at three points, with all, with one and with none of its constants c, C_1.

    C_1 e^t + C_2 t + 1 gives {C e^t + Ct + 1, C e^t + 1, Ct + 1, 1}. Without such constants, or
    with more than six, the list is empty.
    """
    constants = {token for token in tokens if re.fullmatch(r"[cC](_[1-9]\d*)?", token)}
    if not 0 < len(constants) < 7:
        return []
    families = []
    for kept in [set(), constants, *({name} for name in constants)]:
        new = {name: "constant" if name in kept else "zero" for name in constants}
        families.append(_values(tuple(new.get(token, token) for token in tokens)))
    return [Form("{}", list(values)) for values in zip(*families)]


def _derivatives(a: Tokens, b: Tokens) -> bool:
    return any(token.endswith("'") for token in a + b)


@EXPRESSIONS.rule("values")
def _same_values(a, b, fixed=False):
    """`2/4` for `0.5` | `2/3` for `0.5`"""
    if _derivatives(a, b) == fixed:
        return all(map(same, _values(a, fixed), _values(b, fixed)))


@EXPRESSIONS.kind("equations")
def _proportional(a, b, fixed=False):
    """up to a constant factor: `2y=4x` for `y=2x` | another factor: `xy=x` for `y=1`"""
    if _derivatives(a, b) != fixed:
        return False
    # The change of the gap between the sides is compared, because a large constant hides none.
    a, b = _values(a, fixed), _values(b, fixed)
    equations = all(isinstance(x, Form) and x.kind == "=" for x in a + b)
    if not equations or a[0].name == b[0].name != "":  # two values of the same name were compared
        return False
    p, q = ([x.parts[0] - x.parts[1] for x in values] for values in (a, b))
    changes = [(x - p[0], y - q[0]) for x, y in zip(p[1:], q[1:])]
    return all(dp and close(dp * q[0], dq * p[0]) for dp, dq in changes)


@EXPRESSIONS.kind("differential equations")
def _differential(a, b):
    r"""up to a factor without derivatives: `\dot v=\frac{f-bv}{m}` for `m\frac{dv}{dt}+bv=f`.
    In error: `\frac{dy}{dx}=2` for `\frac{dy}{dt}=2` | `v'=-v` for `v'=v`"""
    # Only derivatives differ from point to point.
    return _same_values(a, b, fixed=True) or _proportional(a, b, fixed=True)


@EXPRESSIONS.kind("constants c, C, C_1")
def _constants(a, b):
    r"""reordered: `c_2e^t+c_1` for `C_1e^t+C_2`. In error: `C_1 V^2` for `C_2 V^2` |
    other letters, factors: `Ae^t` for `Ce^t`, `\frac{C}{2}e^t` for `Ce^t`"""
    families = list(zip(_families(a), _families(b)))
    return families != [] and all(same(x, y) for x, y in families)


# \textbf{(B)} 7, B. 7 and Option B. The text must not mention another letter: (B) or (C).
_OPTION = re.compile(
    r"(?s)\A[\s$]*(?:\\(?:text|math)[a-z]*\s*\{\s*)?(?!.*\b[A-Z]\b.*\b[A-Z]\b)"
    r"(?:(?:[Oo]ption|[Cc]hoice)\s*\(?|\((?=[A-Z]\))|(?=[A-Z][.．):]))([A-Z])\b"
)


@CHOICES.rule("options")
def _option(a, b):
    r"""`\textbf{(B)} 7` for `B` | `(B) or (C)` for `B`"""
    options = [(_OPTION.match(text), letter) for text, letter in ((a, b), (b, a))]
    return any(found and found[1] == clean(letter).strip("()") for found, letter in options)


@ANSWERS.rule("expressions")
def _expressions(a, b):
    """`x+1` for `1+x` | `x+1` for `x`"""
    for pair in itertools.product(readings(a), readings(b)):
        with contextlib.suppress(*FAILURES):  # an unreadable answer equals none
            if EXPRESSIONS.accepts(*pair):
                return True
    return False


@ANSWERS.kind("percent")
def _percent(a, b):
    r"""n or n/100: `35\%` for `0.35`. In error: `0.35\%` for `0.35` | `35\%` for `3.5`"""
    if ("%" in a) == ("%" in b):
        return False
    return _expressions(f"({a})/100", b) if "%" in a else _expressions(a, f"({b})/100")


@ANSWERS.rule("texts")
def _texts(a, b):
    r"""`\neg p` for `\neg p.` | `\neg p` for `p`"""
    return a != "" and tokenize(a) == tokenize(b)


@ROUNDING.kind("rounded right answers: 4.4e7, or decimals with three or more digits")
def _rounded(answer, gold):
    r"""within half a unit of the last digit, at most 1 %: `41.83` for `41.8` |
    two digits: `\frac13` for `0.33`"""
    # Only the form shows it: scientific notation (4.5e33), or three or more significant digits.
    gold = gold.strip(" $")
    number = re.fullmatch(r"[-+]?(?=[\d.])(\d*)(?:\.(\d+))?(?:e([-+]?\d{1,3}))?", gold)
    if not number or max(len(answer), len(gold)) > MAX_CHARS:
        return False
    whole, decimals, exponent = number.groups("")
    if not exponent and (not decimals or len((whole + decimals).lstrip("0")) < 3):
        return False
    target, unit = Fraction(gold), Fraction(10) ** (int(exponent or 0) - len(decimals))
    slack = min(unit / 2, abs(target) / 100)
    for tokens in readings(clean(answer)):
        with contextlib.suppress(*FAILURES):
            values = map(bare, _values(tokens))  # a variable differs from point to point
            if all(abs(x - target) <= slack and not x.imag for x in values):
                return True
    return False


def math_equal(answer: str, gold: str) -> bool:
    """Whether a final answer equals the right one. Both are without boxes. It never raises."""
    a, b = answer.strip(), gold.strip()
    if a == b or max(len(a), len(b)) > MAX_CHARS:
        return a.split() == b.split()
    return CHOICES.accepts(a, b) or ANSWERS.accepts(clean(a), clean(b))


def rounds_to(answer: str, gold: str) -> bool:
    """Whether a number with more digits rounds to a gold answer that is a rounded result."""
    return ROUNDING.accepts(answer, gold)
