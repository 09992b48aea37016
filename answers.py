r"""When two mathematical answers are equal.

    math_equal(r"2(n-1)", "$2n-2$")   -> True
    math_equal(r"(1, 2]", "(1, 2)")   -> False

An answer is cleaned (spacing, units, thousands separators), cut into tokens, and read by a small
recursive-descent parser that computes while it reads: exactly (int, Fraction) as long as the
expression is rational, in floats or complex numbers otherwise. A variable takes fixed values that
depend on its name alone, and two answers are equal when they agree at every such point. What
cannot be read is compared as text. Model text is never run as code, and every path is bounded:
length, nesting, number of tokens read, digits and exponents all have a limit.

Right answers that are still refused:
- identities that hold only for integers, (-1)^n = cos(pi n), or only on a branch of a root;
- families written with other constants: C_1 for A, or pi/6 + 2 pi k beside pi/6 + pi k;
- fewer digits than the gold answer has, 41 for 41.8, and another unit, 1 m for 100 cm;
- a bare one-letter unit outside \text or \mathrm, "5 m" for 5: it reads as a variable;
- integers with spaced separators, 11, 111, 100: they read as a list;
- a bar that is mere notation, AB for \overline{AB}: over z it is the conjugate;
- sums, integrals, set builders, piecewise functions, and paraphrases of text answers;
- numbers beyond about 10^300 that are irrational, and rational ones beyond 4,096 bits.
Units are dropped, not compared: 15 cm^3 counts for 15 cm^2.
"""

import cmath
import functools
import itertools
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 1_000  # longer answers are compared as text
MAX_DEPTH = 40  # nested groups, at most nine of Python's thousand frames each
MAX_STEPS = 2_500  # tokens taken in one reading
MAX_BITS = 4_096  # size of an exact number; 100! / 2^50 and 10^100 fit
MAX_UNORDERED = 32  # longer lists are compared in order
TOLERANCE = 1e-9  # relative: far above rounding, far below 1.5 against 1.50001
MAX_FLOOR_TOKENS = 20_000  # tokens of all sample points at which floors are compared
SMALL_POINTS = 12  # sample points with small integers, where floors are compared
INFINITY = 1.7e300  # stands for \infty and keeps -\infty apart from it

# ---- cleaning: one spelling for what LaTeX, Unicode and plain text write in many ---------------

_UNICODE = {"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∞": "\\infty "}
_UNICODE |= {"√": " sqrt ", "π": "\\pi ", "∪": "\\cup ", "∈": "\\in ", "’": "'", "′": "'"}
_UNICODE |= {"²": "^{2}", "³": "^{3}", "£": " ", "€": " ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}"}
_UNICODE |= {"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "≡": "\\equiv "}
_UNICODE = str.maketrans(_UNICODE | dict.fromkeys("\u00a0\u2009\u202f~\t\r\n", " "))
_FUNCTIONS = {
    **{"sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "cot": lambda x: 1 / cmath.tan(x)},
    **{"sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x)},
    **{"arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan},
    **{"sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh, "exp": cmath.exp},
    **{"log": cmath.log, "ln": cmath.log, "lg": cmath.log10},  # log alone is natural
}
_NUMBER_WORDS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6}
_NUMBER_WORDS |= {"billion": 10**9, "trillion": 10**12}
_NUMBER_WORD = "|".join(_NUMBER_WORDS)
_VALUE_WORDS = (  # words that change a value: a text with one of them is no unit
    "least|most|about|approx[a-z]*|around|roughly|nearly|almost|between|more|less|fewer|greater|"
    "larger|smaller|over|under|above|below|up|not?|without|except|minus|plus|negative|squared|"
    "cubed|factorial|reciprocal|root of|multiples?|twice|double|triple|half|halves|quarters?|"
    rf"(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|(?:{_NUMBER_WORD})(?:th)?)s?"
)
_COMMAND = r"\\(?:text(?:rm|bf|it|normal|sf)?|mathrm|mbox|hbox|rm)\s*\{"
_INSIDE = r"(?:[^{}]|\{[^{}]*\})*"
_TEXT = rf"{_COMMAND}({_INSIDE})\}}"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_NO_UNIT = rf"[^{{}}]*(?:\b(?:{_VALUE_WORDS})\b|=|(?<![A-Za-z^])(?<!\^-)\d)"
_UNIT = rf"{_COMMAND}(?!(?i:{_NO_UNIT})){_INSIDE}\}}{_POWER}"
_UNITS = re.compile(rf"{_UNIT}(?:(?:\s|[/*·]|\\cdot|\\times)*{_UNIT})*")
_WORD = rf"\s+(?!(?:and|or|mod|sqrt|{_VALUE_WORDS}|{'|'.join(_FUNCTIONS)})\b)[A-Za-z]{{3,}}\b"
_WORD += r"|\s*(?:[ckm]m|[km]g|m[lLs]|ft|lb|oz|hr|Hz|[kM]?eV|k?Pa|k[JN]|in)\b"


def _unescaped(match: re.Match) -> str:
    return match[0].replace("\\\\", "\\")


def _joined(match: re.Match) -> str:
    return re.sub(r"\D", "", match[0])


def _repeating(match: re.Match) -> str:
    r"""The decimal 0.1\overline{6} as an exact quotient."""
    digits, fixed, period = match[1] + match[2] or "0", match[2], match[3]
    return f"(({digits}{period}-{digits})/{'9' * len(period)}{'0' * len(fixed)})"


def _multiplied(match: re.Match) -> str:
    r"""The words of "5 hundred thousand" as a factor; a \text{ in front of them stays."""
    factor = math.prod(_NUMBER_WORDS[word] for word in re.findall(_NUMBER_WORD, match[2]))
    return f"*{factor}{match[1] or ' '}"


def _without_units(match: re.Match) -> str:
    r"""The answer without units, or the content of \text where the answer is nothing else.

    A unit between other things leaves \unit..., so that 5 ft 6 in does not become 5 6.
    """
    text = match[0].strip()

    def mark(unit: re.Match) -> str:
        at_an_end = unit.start() == 0 or unit.end() == len(text)
        return " " if at_an_end else " \\unit" + re.sub("[^A-Za-z]", "", unit[0]) + " "

    if re.search(r"[A-Za-z0-9]", _UNITS.sub("", text)):
        text = _UNITS.sub(mark, text)
    return re.sub(_TEXT, r" \1 ", text)


_REALS = r"(-\infty,\infty)"
_QUANTITY = rf"(?<=[\d)}}])\s*({_COMMAND})?((?:\s*\b(?:{_NUMBER_WORD})\b)+)"
_THOUSANDS = r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,\s*\\[!,]|\\[,!; ]| )\s*\d{3}(?!\d))+"
_WHOLE = r"(?<![\d.^_}/*])(\d+)"  # the 1 of 1\frac{4}{5}
_INDEX = r"\s*(?:\{[^{}]*\}|\w))"
_TRAILING = rf"(?<=[\d.)}}°%])(?:{_WORD})(?:(?:{_WORD}|\s*/\s*[A-Za-z]+){_POWER})*{_POWER}\s*$"

# (pattern, replacement, an example, the same example after all rules), applied in order. In a
# pattern, TEXT stands for \text{...} and its kind, and ~ for the end of a command's name.
_RULES = [
    (r"(?s)\A(?!.*(?<!\\)\\begin).*", _unescaped, r"\\frac{1}{4}", r"\frac{1}{4}"),
    (r"\\?\$|(?<!\\)\\[()\[\]]|\\(?:displaystyle|(?:tri)?angle)~", " ", r"\(\angle A\)", "A"),
    (r"\\(?:left|right|[bB]igg?[lrm]?)~\s*\.?", "", r"\left(1, 2\right]", "(1, 2]"),
    (r"\{\s*\\rm~", r"\\rm{", r"5 {\rm cm}", "5"),
    (r"_\s*(?:\{\s*TEXT\s*\}|TEXT)", r"_{\1\2}", r"v_{\text {red}}", r"v_{red}"),
    (r"\\operatorname\s*\{\s*([A-Za-z]+)\s*\}", r"\\\1 ", r"\operatorname{sin}x", r"\sin x"),
    (r"\\mathrm\s*\{\s*([eid])\s*\}", r" \1 ", r"2\mathrm{e}", "2 e"),
    (r"COMMAND\s*,?\s*and\s*,?\s*\}|\band\b", ",", r"1\text{ and }2", "1,2"),
    (r"COMMAND\s*,?\s*or\s*,?\s*\}|\\(?:lor|vee)~|\bor\b", "∨", r"1\text{ or }2", "1∨2"),
    (r"(?:COMMAND\s*)?\bper ?cent\b\s*\}?", "%", r"8 \text{ percent}", "8 %"),
    (_QUANTITY, _multiplied, r"5 \text{ million dollars}", "5*1000000"),
    (_THOUSANDS, _joined, r"1{,}234\,567", "1234567"),
    (r"(?<!\\)\\[,;:!> ]|\\q?quad~", " ", r"x\;y\quad z", "x y  z"),
    (r"(?s).+", _without_units, r"5\,\mathrm{W\,m^{-2}}", "5"),
    (
        r"\\mathbb\s*\{?\s*R~\s*\}?|\ball real numbers\b",
        r"(-\\infty,\\infty)",
        r"\mathbb{R}",
        r"(-\infty,\infty)",
    ),
    (r"\\(?:math(?:bf|bb|cal|it|sf)|boldsymbol|bm|vec|hat)~", " ", r"a \vec{v}", "a  {v}"),
    (r"\\\{\s*\\\}", r"\\emptyset ", r"\{ \}", r"\emptyset"),
    (r"(?:\{\s*\}\s*)?\^\s*\{?\s*\\circ\s*\}?|\\degrees?~", "°", r"30^{\circ}", "30°"),
    (r"\^\s*\{?\s*\\prime\s*\}?", "'", r"y^{\prime}", "y'"),
    (r"\\dot\s*\{\s*(\\?[A-Za-z]+)\s*\}", r"\1˙", r"\dot{x}", "x˙"),
    (r"\\ddot\s*\{\s*(\\?[A-Za-z]+)\s*\}", r"\1˙˙", r"\ddot{\theta}_1", r"\theta˙˙_1"),
    (r"(\d*)\.(\d*)\\over(?:line|bar)\s*\{(\d+)\}", _repeating, r"0.\overline{3}", "((03-0)/9)"),
    (r"\\(?:cdot|times|ast)~", "*", r"2 \cdot 3", "2 * 3"),
    (r"(?<=\d)\s*x\s*(?=10\s*\^)", "*", "3 x 10^8", "3*10^8"),
    (r"\*\*", "^", "2**3", "2^3"),
    (r"\\div~", "/", r"1 \div 2", "1 / 2"),
    (r"\b(?:np|numpy|math)\.", "", "np.sin(x)", "sin(x)"),
    (r"\\[dtc](frac|binom)", r"\\\1", r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\{(INSIDE)\\choose~(INSIDE)\}", r"\\binom{\1}{\2}", r"{4 \choose 2}", r"\binom{4 }{ 2}"),
    (r"(\\frac|\\binom)\s*(\d)", r"\1{\2}", r"\frac 1{x}", r"\frac{1}{x}"),
    (r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", r"\frac{1}2", r"\frac{1}{2}"),
    (_WHOLE + r"\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}", r"(\1+\2/\3)", r"1\frac{4}{5}", "(1+4/5)"),
    (_WHOLE + r" +(\d+)\s*/\s*(\d+)", r"(\1+\2/\3)", "137 1/2", "(137+1/2)"),
    (rf"(?<=[A-Za-z}}])\s*(\^{_INDEX}\s*(_{_INDEX}", r"\2\1", "r^2_1", "r_1^2"),
    (r"\(\s*(\d+)\s*\)\s*_", r"\1_", "(52)_8", "52_8"),
    (r"\(\s*(?:\\[bp]?)?mod~\s*([^()]*)\)", r"\\pmod{\1}", "5 (mod 7)", r"5 \pmod {7}"),
    (r"\\[bp]?mod~|\bmod\b", r"\\pmod ", r"5 \bmod 7", r"5 \pmod  7"),
    (r"(?<=[)\]}])\s*U\s*(?=[(\[{\\])", r"\\cup ", "(1,2)U(3,4)", r"(1,2)\cup (3,4)"),
    (_TRAILING, "", "120 miles per hour", "120"),
    (r",\s*(?=[,∨])", "", "1, 2, and 3", "1, 2, 3"),
    (r"^\s*\\(?:approx|sim)~", "", r"\approx 3.14", "3.14"),
]


_ABBREVIATIONS = {"TEXT": _TEXT, "COMMAND": _COMMAND, "INSIDE": _INSIDE, "~": "(?![A-Za-z])"}


def _compiled(pattern: str) -> re.Pattern:
    for name, meaning in _ABBREVIATIONS.items():
        pattern = pattern.replace(name, meaning)
    return re.compile(pattern)


_COMPILED = [(_compiled(pattern), new) for pattern, new, _, _ in _RULES]


@functools.lru_cache(maxsize=4096)
def _clean(text: str) -> str:
    text = text.translate(_UNICODE).strip().rstrip(".").strip()
    for pattern, new in _COMPILED:
        text = pattern.sub(new, text)
    return text.strip(" =:").rstrip(" .,")


# ---- reading: tokens, and a parser that computes -----------------------------------------------

_SYMBOLS = "frac binom sqrt pi infty lfloor rfloor lceil rceil begin end pmod emptyset".split()
_COMMANDS = frozenset([*_FUNCTIONS, *_SYMBOLS])
_TOKEN = re.compile(
    r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
    r"|\\begin\s*\{[a-z]*\}(?:\s*\{[lcr|\s]*\})?|\\end\s*\{[a-z]*\}"
    rf"|\\?(?:{'|'.join(_FUNCTIONS)}|sqrt|pi|infty)(?![A-Za-z])|sqrt(?=\d)"
    r"|(?:\\[A-Za-z]+|[A-Za-z])[˙']*(?:\s*_\s*(?:\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z0-9]))?'*"
    r"|[<>]=|(?<![\d)}\]!])!=|\\.|\S",
    re.S,
)
_ALIASES = r"""
\leq ≤ \leqslant ≤ \le ≤ \geq ≥ \geqslant ≥ \ge ≥ \lt < \gt > \ne ≠ \neq ≠ \approx ≈ \in ∈ \cup ∪
>= ≥ <= ≤ != ≠ \equiv = \varnothing emptyset
\pm ± \mp ∓ \langle ( \rangle ) \lbrace \{ \rbrace \} \lvert | \rvert | \vert | \mid | \| |
""".split()
_ALIASES = dict(zip(_ALIASES[::2], _ALIASES[1::2], strict=True))
_ALIASES |= {"\\" + name: name for name in _COMMANDS}
_RELATIONS = frozenset("= < > ≤ ≥ ≠ ≈ ∈ :".split())
_STOP = (
    _RELATIONS | frozenset(") ] } \\} , ; ∨ ∪ + - ± ∓ & \\\\ rfloor rceil end pmod".split()) | {""}
)
_CLOSING = {"(": ")]", "[": ")]", "\\{": ("\\}", "}"), "{": ("}", "\\}")}


class _Unreadable(ValueError):
    """The text is no answer that the parser knows, or it is over a limit."""


_FAILURES = (ArithmeticError, ValueError, TypeError)  # 1 / 0; _Unreadable; a set plus one


@dataclass(eq=False)
class _Form:
    """Anything but one number, by kind: "()", "(]", "[)", "[]" point or interval; "{}" set or list;
    "∪" union; "=", "<", "≤", "≠" relation; "≈" exact value and its rounding; "mod" number and
    modulus; ":" ratio; "_" digits and base; "matrix3" by its width.

    `name` is what a relation only names: x in x = 5 and x < 5, f(n) in f(n) = 2n, AB in AB = 4.
    """

    kind: str
    parts: list
    name: str = ""

    def __mul__(self, factor):
        if self.kind != "()" and not self.kind.startswith("matrix") or isinstance(factor, _Form):
            raise _Unreadable(f"product with {self.kind}")
        return _Form(self.kind, [_bounded(factor * part) for part in self.parts])

    __rmul__ = __mul__


def _tokens(text: str) -> list[str]:
    tokens = []
    for token in _TOKEN.findall(text):
        if token.startswith("\\begin"):
            token = "\\begin" if re.search(r"\{(?:[pb]?matrix|array)\}", token) else "?"
        elif token.startswith("\\end"):
            token = "\\end"
        elif "_" in token:
            token = re.sub(r"[\s{}]", "", token)
        tokens.append(_ALIASES.get(token, token))
    return tokens


def _is_name(token: str) -> bool:
    return token.lstrip("\\")[:1].isalpha() and token not in _COMMANDS and token not in ("e", "i")


def _exact(x) -> bool:
    return isinstance(x, (int, Fraction))


def _bounded(x):
    """`x`, in floating point where its exact form is over the limit."""
    if _exact(x) and max(x.numerator.bit_length(), x.denominator.bit_length()) > MAX_BITS:
        return float(x)
    return x


def _divide(a, b):
    if isinstance(a, _Form):
        return a * _divide(1, b)
    return _bounded(Fraction(a, b)) if _exact(a) and _exact(b) else a / b


def _power(a, b):
    if not _exact(a) or not _exact(b):
        return a**b
    size = max(a.numerator.bit_length(), a.denominator.bit_length())
    if b.denominator == 1 and size * abs(b) <= MAX_BITS:
        return Fraction(a) ** int(b)
    return float(a) ** float(b)


def _root(x, index):
    if not isinstance(x, complex) and x < 0 and _exact(index) and index % 2:
        return -_power(-x, _divide(1, index))  # the real root of an odd index
    return _power(x, _divide(1, index))


def _factorial(x):
    small = _exact(x) and x.denominator == 1 and 0 <= x <= 500
    return math.factorial(int(x)) if small else math.gamma(x + 1)


def _floor(x) -> int:
    """Floor, where log(1000) / log(10) counts as 3 in spite of rounding."""
    return math.floor(x if _exact(x) else x + TOLERANCE)


def _number(token: str):
    mantissa, _, exponent = token.lower().partition("e")
    if len(exponent) > 4:
        raise _Unreadable("too many digits")
    return Fraction(token)


def _rounds(exact, rounded, tokens: list[str]) -> bool:
    """Whether a number of at least two digits is what `exact`, perhaps an angle, rounds to."""
    digits = next((t for t in tokens if t[0] in ".0123456789"), "").replace(".", "").lstrip("0")
    if len(digits) < 2 or isinstance(exact, _Form) or isinstance(rounded, _Form):
        return False
    exact = complex(exact).real
    unit = 10.0 ** (math.floor(math.log10(abs(rounded))) - len(digits) + 1)
    return any(abs(x - rounded) <= unit * 0.5000001 for x in (exact, math.degrees(exact)))


# Sides of an equation that name a value; n stands for a name in them and 1 for a number.
_NAME = re.compile(r"n(?:\(n(?:,n)*\))?|\(n(?:,n)+\)")
_FACTOR = r"(?:n(?:\(-?1(?:,-?1)*\)|\{n+\})?|\[n+\]|\|n+\||frac\{n+\}\{n+\})"
_NAMED_NUMBER = re.compile(rf"{_FACTOR}+(?:[-+*/]{_FACTOR}+)*")  # AB, f(2), m + n, [ABC], |AB|
_ANGLE_FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc")


def _side_names(sides: list[list[str]]) -> list[str]:
    """What each side of a relation names, "" for a side that is a value."""
    named = [side[0] if len(side) == 1 and _is_name(side[0]) else "" for side in sides]
    kinds = "".join(
        "n" if _is_name(t) or t == "e" or t in _ANGLE_FUNCTIONS else "1" if t[0].isdigit() else t
        for t in sides[0]
    )
    others_are_numbers = not any(_is_name(t) for side in sides[1:] for t in side)
    if _NAME.fullmatch(kinds) or others_are_numbers and _NAMED_NUMBER.fullmatch(kinds):
        named[0] = "".join(sides[0])
    return named


def _union(parts: list, name: str = ""):
    """Sets as one union, in which all points stand in one set."""
    if not all(isinstance(part, _Form) for part in parts):
        raise _Unreadable("a union of numbers")
    parts = [q for p in parts for q in (p.parts if p.kind == "∪" else [p])]
    points = [x for p in parts if p.kind == "{}" for x in p.parts]
    parts = [p for p in parts if p.kind != "{}"] + ([_Form("{}", points)] if points else [])
    return _Form("∪", parts, name) if len(parts) > 1 else parts[0]


def _alternatives(parts: list) -> list:
    """x < 0 or x = 1 as one union; parts that are no conditions on one variable as they are."""
    names = {part.name if isinstance(part, _Form) else "" for part in parts}
    if len(names) > 1 or "" in names or all(part.kind == "=" for part in parts):
        return parts
    sets = [_Form("{}", part.parts[1:]) if part.kind == "=" else part for part in parts]
    return [_union(sets)]


def _draw(name: str, point: int, domain: str):
    """The value of a variable at a sample point: any fixed number that depends on both."""
    seed = zlib.crc32(f"{name} {point}".encode())
    value = 0.2 + seed / 2**31
    if "integer" in domain:
        value = 2 + seed % (37 if point < SMALL_POINTS else 10 ** (point - SMALL_POINTS + 3))
    return -value if "signed" in domain and seed >> 8 & 1 else value


_CONSTANTS = {"pi": math.pi, "infty": INFINITY, "e": math.e, "i": 1j}


class _Reader:
    """Computes the answer that `tokens` spell, at sample point number `point`.

    A variable that `values` does not give is drawn; `floors` keeps what floors were taken of.
    """

    def __init__(self, tokens: list[str], point: int, domain: str, values: dict | None = None):
        self.tokens, self.at, self.steps, self.depth = [*tokens, ""], 0, 0, 0
        self.point, self.domain, self.values, self.floors = point, domain, dict(values or {}), []
        self.sign, self.plus_minus = 1, False  # what ± stands for, and whether one was read
        self.bars = self.angles = 0  # open |, and trigonometric functions around the token

    @property
    def next(self) -> str:
        return self.tokens[self.at]

    def take(self, expected=None) -> str:
        token = self.tokens[self.at]
        self.at, self.steps = self.at + 1, self.steps + 1
        if not token or self.steps > MAX_STEPS or expected and token not in expected:
            raise _Unreadable(token)
        return token

    def answer(self):
        parts = self.items(expand=True)
        if self.next:
            raise _Unreadable(self.next)
        return parts[0] if len(parts) == 1 else _Form("{}", parts)

    def items(self, expand: bool) -> list:
        """Items between commas or "or". With `expand`, an item with ± becomes two."""
        parts, separators = [], set()
        while True:
            start = self.at
            parts.append(self.relation())
            if expand and self.plus_minus:
                self.at, self.sign = start, -1
                parts.append(self.relation())
                self.sign, self.plus_minus = 1, False
            if self.next not in (",", ";", "∨"):
                return _alternatives(parts) if separators == {"∨"} else parts
            separators.add(self.take())

    def relation(self):
        parts, sides, operators = [], [], []
        while True:
            start = self.at
            parts.append(self.union())
            sides.append(self.tokens[start : self.at])
            if self.next not in _RELATIONS:
                break
            operators.append(self.take())
        if not operators:
            return parts[0]
        names = _side_names(sides)
        if (
            "≈" in operators
        ):  # x ≈ 3.14 names a number; π ≈ 3.14 is π, and 3.14 where that is wanted
            i = operators.index("≈")
            if i > 0 or not names[0] or not self.values:
                rounded = _rounds(parts[i], parts[-1], sides[-1])
                parts[i] = _Form("≈", [parts[i], parts[-1]]) if rounded else parts[i]
                parts, names, operators = parts[: i + 1], names[: i + 1], operators[:i]
            else:
                parts, names, operators = parts[:2], names[:2], ["="]
            if not operators:
                return parts[0]
        if set(operators) == {":"}:
            ratio = [_divide(part, parts[-1]) for part in parts[:-1]]
            return ratio[0] if len(ratio) == 1 else _Form(":", ratio)
        if operators == ["∈"] and names[0] and isinstance(parts[1], _Form):
            return _Form(parts[1].kind, parts[1].parts, names[0])
        if operators == ["≠"] and any(names):
            value = parts[1] if names[0] else parts[0]
            below, above = _Form("()", [-INFINITY, value]), _Form("()", [value, INFINITY])
            return _Form("∪", [below, above], names[0] or names[1])
        if set(operators) == {"="}:
            return self.equation(parts, names)
        return self.inequality(parts, names, operators)

    def equation(self, parts: list, names: list[str]):
        if len(parts) > 2 and all(names[:-1]) and len(set(names)) == len(names):
            return _Form("{}", [_Form("=", [x, parts[-1]], n) for x, n in zip(parts[:-1], names)])
        if not names[0]:
            parts, names = parts[::-1], names[::-1]
        if not all(_same(part, parts[-1]) for part in parts[1:]):
            raise _Unreadable("sides of a chain that differ")
        if _same(parts[0], parts[-1]):
            return parts[0]  # 2 + 3 = 5 stands for 5
        return _Form("=", [parts[0], parts[-1]], names[0])

    def inequality(self, parts: list, names: list[str], operators: list[str]):
        if set(operators) <= {">", "≥"}:
            parts, names = parts[::-1], names[::-1]
            operators = ["<" if op == ">" else "≤" for op in operators[::-1]]
        if set(operators) <= {"<", "≤"}:
            if len(parts) == 2 and names[0]:  # x < 2 is (-infinity, 2)
                parts, operators, names = [-INFINITY, *parts], ["<", *operators], ["", *names]
            elif len(parts) == 2 and names[1]:
                parts, operators = [*parts, INFINITY], [*operators, "<"]
            if len(parts) == 3 and names[1]:
                ends = ("[" if operators[0] == "≤" else "(") + ("]" if operators[1] == "≤" else ")")
                return _Form(ends, [parts[0], parts[2]], names[1])
        return _Form("".join(operators), parts)

    def union(self):
        parts = [self.residue()]
        while self.next == "∪":
            self.take()
            parts.append(self.residue())
        return parts[0] if len(parts) == 1 else _union(parts)

    def residue(self):
        value = self.sum()
        if self.next != "pmod":
            return value
        self.take()
        return _Form("mod", [value, self.primary()])

    def sum(self):
        value = self.product()
        while self.next in ("+", "-", "±", "∓"):
            value = _bounded(value + self.product())
        return value

    def signs(self) -> int:
        sign = 1
        while self.next in ("+", "-", "±", "∓"):
            token = self.take()
            self.plus_minus |= token in "±∓"
            sign *= {"+": 1, "-": -1, "±": self.sign, "∓": -self.sign}[token]
        return sign

    def product(self):
        sign, start = self.signs(), self.at
        first, value = self.next, self.power()
        if sign < 0:
            value = -1 * value
        while True:
            if self.next == "*":
                self.take()
                sign, start = self.signs(), self.at
                value = _bounded(value * sign * self.power())
            elif self.next == "/":
                self.take()
                sign, start = self.signs(), self.at
                value = _divide(value, sign * self.power())
            elif self.next in _STOP or (self.next == "|" and self.bars):
                return value
            else:
                last, start = start, self.at
                factor = self.neighbour(last)
                if isinstance(factor, _Form) and factor.kind in ("(]", "[)") and _is_name(first):
                    return factor  # "t(0,4]" has lost the sign of membership
                value = _bounded(value * factor)

    def neighbour(self, last: int):
        """The factor right beside the one that starts at token `last`: no plain number, so that
        2 3, x 2 and 5° 30 are no products, while 2 x, 2^3 5 and n 2^n are."""
        before, start = self.tokens[last : self.at], self.at
        factor = self.power()
        digits = [t for t in self.tokens[start : self.at] if t not in "{}"]
        if len(digits) == 1 and digits[0][0] in ".0123456789":
            if len([t for t in before if t not in "{}°"]) == 1:
                raise _Unreadable("a number beside a number or a name")
        return factor

    def power(self):
        values = [self.primary()]
        while True:
            if self.next == "^":
                self.take()
                sign = self.signs()
                values.append(sign * self.primary())
            elif self.next == "!":
                self.take()
                if self.next == "!":
                    raise _Unreadable("double factorial")
                values[-1] = _factorial(values[-1])
            elif self.next == "°":
                self.take()
                values[-1] = values[-1] * math.pi / 180 if self.angles else values[-1]
            elif self.next.startswith("\\unit"):
                self.take()
                if not (self.next in _STOP or self.next in _RELATIONS or self.next in "*/|"):
                    raise _Unreadable("a unit, then another factor")
            else:
                break
        value = values.pop()
        while values:
            value = _power(values.pop(), value)
        return value

    def primary(self):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Unreadable("nested too deeply")
        token = self.take()
        if token[0] in ".0123456789":
            value = self.number(token)
        elif token in _CLOSING:
            value = self.group(token)
        elif token == "|":
            self.bars += 1
            value = abs(self.sum())
            self.take("|")
            self.bars -= 1
        elif token in ("lfloor", "lceil"):
            value = self.sum()
            value = value if _exact(value) else complex(value).real
            self.floors.append(value)
            value = _floor(value) if token == "lfloor" else -_floor(-value)
            self.take(("rfloor", "rceil"))
        elif token == "frac":
            value = _divide(self.primary(), self.primary())
        elif token == "binom":
            n, k = self.primary(), self.primary()
            value = _divide(_factorial(n), _factorial(k) * _factorial(n - k))
        elif token == "sqrt":
            index = 2
            if self.next == "[":
                self.take()
                index = self.sum()
                self.take("]")
            value = _root(self.primary(), index)
        elif token in _FUNCTIONS:
            value = self.function(token)
        elif token == "begin":
            value = self.matrix()
        elif token == "emptyset":
            value = _Form("{}", [])
        elif token in _CONSTANTS:
            value = _CONSTANTS[token]
        elif _is_name(token):
            value = self.variable(token)
        else:
            raise _Unreadable(token)
        self.depth -= 1
        return value

    def number(self, token: str):
        if self.next == "_":
            self.take()
            base = self.take()
            if base == "{":
                base = self.take()
                self.take("}")
            return _Form("_", [_number(token), _number(base)])
        return _number(token)

    def group(self, opening: str):
        bars, self.bars = self.bars, 0
        parts = self.items(expand=opening == "\\{")
        self.bars = bars
        closing = self.take(_CLOSING[opening])
        if opening == "\\{" or opening == "{" and len(parts) > 1:
            return _Form("{}", parts)
        if len(parts) == 1 and opening + closing in ("()", "[]", "{}"):
            return parts[0]
        return _Form(opening + closing, parts)

    def function(self, name: str):
        base = exponent = None
        while self.next in ("_", "^"):
            if self.take() == "_":
                base = self.primary()
            else:
                exponent = self.signs() * self.primary()
        angle = name in _ANGLE_FUNCTIONS
        self.angles += angle
        if self.next in _CLOSING:
            argument = self.primary()
        else:  # sin 2t, ln x^2: all factors up to an operator or the next function
            sign, start = self.signs(), self.at
            argument = sign * self.power()
            while not (self.next in _STOP or self.next in "*/|" or self.next in _FUNCTIONS):
                last, start = start, self.at
                argument = _bounded(argument * self.neighbour(last))
        self.angles -= angle
        if exponent == -1 and name in ("sin", "cos", "tan"):
            return _FUNCTIONS["arc" + name](argument)
        value = _FUNCTIONS[name](argument) / (1 if base is None else cmath.log(base))
        return value if exponent is None else _power(value, exponent)

    def matrix(self):
        rows = [[self.sum()]]
        while self.take(("&", "\\\\", "end")) != "end":
            if self.tokens[self.at - 1] == "&":
                rows[-1].append(self.sum())
            elif self.next != "end":
                rows.append([self.sum()])
        parts = [x for row in rows for x in row]
        return _Form("()" if len(rows[0]) == 1 else f"matrix{len(rows[0])}", parts)

    def variable(self, name: str):
        """A variable, or a value like I(0) and f(x, y), which is no product."""
        if self.next == "(":
            inside = list(
                itertools.takewhile(lambda t: t not in ("", ")"), self.tokens[self.at + 1 :])
            )
            if inside == ["0"] or len(inside) > 2 and set(inside[1::2]) == {","}:
                self.at, name = self.at + len(inside) + 2, f"{name}({''.join(inside)})"
        return self.values.setdefault(name, _draw(name, self.point, self.domain))


# ---- equality ---------------------------------------------------------------------------------


def _close(a, b) -> bool:
    if _exact(a) and _exact(b):
        return a == b
    size = max(abs(a), abs(b))
    slack = TOLERANCE * size if a and b else 1e-12  # beside an exact zero, what rounding leaves
    return size < math.inf and abs(a - b) <= slack


def _same(a, b) -> bool:
    """Whether two values that were read at the same point are the same answer."""
    if not isinstance(a, _Form) and not isinstance(b, _Form):
        return _close(a, b)
    kinds = [x.kind if isinstance(x, _Form) else "" for x in (a, b)]
    if kinds[0] != kinds[1]:
        for x, kind, y in ((a, kinds[0], b), (b, kinds[1], a)):
            if kind == "=" and x.name or kind == "{}" and len(x.parts) == 1:
                return _same(x.parts[-1], y)
            if kind == "≈":
                return any(_same(part, y) for part in x.parts)
            if kind in ("_", "mod") and not isinstance(y, _Form):  # the question names the base
                return _same(x.parts[0], y)
        return False
    if len(a.parts) != len(b.parts):
        return False
    if kinds[0] == "≈":
        return _same(a.parts[0], b.parts[0])
    if kinds[0] == "mod" and _same(a.parts[1], b.parts[1]):
        return _exact(a.parts[1]) and (a.parts[0] - b.parts[0]) % a.parts[1] == 0
    if kinds[0] in ("{}", "∪", "≠", "=") and len(a.parts) <= MAX_UNORDERED:
        rest = list(b.parts)
        for x in a.parts:
            match = next((i for i, y in enumerate(rest) if _same(x, y)), None)
            if match is None:
                return False
            rest.pop(match)
        return True
    return all(map(_same, a.parts, b.parts))


_DEFINITION = re.compile(
    r"(?:^|[,;∨] )\\?[A-Za-z]\S* \( (\\?[A-Za-z]\S*(?: , \\?[A-Za-z]\S*)*) \) ="
)


def _renamed(tokens: list[str]) -> list[str]:
    """The tokens of f(x) = 2x, g(t) = t, with each argument named by its place."""
    text = " ".join(tokens)
    definitions = list(_DEFINITION.finditer(text))
    ends = [m.start() for m in definitions[1:]] + [len(text)]
    out = text[: definitions[0].start()].split()
    for definition, end in zip(definitions, ends):
        places = {name: f"\\place{i}" for i, name in enumerate(definition[1].split(" , "))}
        out += [places.get(token, token) for token in text[definition.start() : end].split()]
    return out


def _near_jumps(tokens: list[str], point: int, domain: str) -> Iterator[dict]:
    """Integers around which a floor in `tokens` jumps, found by Newton's method."""

    def floors(values: dict) -> _Reader:
        reader = _Reader(tokens, point, domain, values)
        reader.answer()
        return reader

    first = floors({})
    for name, i in itertools.product(list(first.values), range(len(first.floors))):
        at = first.values[name]
        for _ in range(8):
            x, y = (floors({**first.values, name: v}).floors[i] for v in (at, at + 1))
            if x == y or not 2 < at < 10**9:
                break
            step = math.ceil((math.floor(first.floors[i]) + (y > x) - x) / (y - x))
            at += step
            if not step:
                break
        for near in (at - 1, at, at + 1):
            yield {**first.values, name: near}


def _sample_points(a: list[str], b: list[str], domain: str) -> Iterator[tuple[int, dict]]:
    """Numbers of the sample points, and the values of variables that are not drawn."""
    if "integer" not in domain:
        yield from ((point, {}) for point in range(6 if domain == "signed" else 3))
        return
    for point in range(SMALL_POINTS + 3):
        yield point, {}
    for point in range(SMALL_POINTS - 1, SMALL_POINTS + 3):
        for tokens in (a, b):
            yield from ((point, values) for values in _near_jumps(tokens, point, domain))


def _proportional(pairs: list[tuple]) -> bool:
    """Whether equations are the same but for a constant factor: y = 2x and 2x - y = 0."""
    gaps = [[z.parts[0] - z.parts[1] for z in pair] for pair in pairs]
    p0, q0 = gaps[0]
    return len(gaps) > 1 and all(p and q and _close(p * q0, q * p0) for p, q in gaps)


def _agree(a: list[str], b: list[str]) -> bool:
    """Whether two token lists give the same answer at every sample point."""
    if all(_DEFINITION.search(" ".join(tokens)) for tokens in (a, b)):
        a, b = _renamed(a), _renamed(b)
    try:
        signed = "signed" if "|" in {*a, *b} else "positive"
        # Variables are positive, as in counting and physics: sqrt(x^2) is x. Floors are taken of
        # integers, and an absolute value asks for negative numbers too.
        if {*a, *b} & {"lfloor", "lceil"}:
            return _agree_on(a, b, signed + " integer")
        return _agree_on(a, b, signed)
    except _FAILURES:
        return False


def _agree_on(a: list[str], b: list[str], domain: str) -> bool:
    pairs, floors = [], []
    budget = max(SMALL_POINTS, MAX_FLOOR_TOKENS // (len(a) + len(b)))
    for point, values in itertools.islice(_sample_points(a, b, domain), budget):
        readers = [_Reader(tokens, point, domain, values) for tokens in (a, b)]
        x, y = (reader.answer() for reader in readers)
        equations = all(isinstance(z, _Form) and z.kind == "=" for z in (x, y))
        if not equations and not _same(x, y):
            return False
        pairs.append((x, y))
        floors.append(readers[0].floors + readers[1].floors)
        if not any(reader.values for reader in readers):
            break
    if not all(_same(x, y) for x, y in pairs) and not _proportional(pairs):
        return False
    # A floor of what is an integer at all these points says that the variables are real numbers.
    if any(all(x == _floor(x) for x in taken) for taken in zip(*floors)):
        return _agree_on(a, b, "signed")
    return True


def _readings(text: str) -> list[list[str]]:
    """Token lists for a cleaned answer; 100,200 may be one number or two."""
    text = re.sub(r"\\?%", "", text)
    merged = text
    if not re.search(r"[()\[\]{}]", text) or not re.search(r"[(\[{][^)\]}]*,", text):
        merged = re.sub(
            r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text
        )
    return [_tokens(t) for t in dict.fromkeys((merged, text))]


def _is_words(text: str) -> bool:
    if not re.fullmatch(r"[A-Za-z\s,.'()\-]+", text):
        return False
    words = re.findall(r"[A-Za-z]+", text)
    return any(len(w) > 2 and w not in _COMMANDS or w.lower() == "no" for w in words)


def _same_text(a: str, b: str) -> bool:
    """Whether two texts differ in spaces only, and not in one that separates digits."""
    a, b = ("".join(re.sub(r"(?<=\d)\s+(?=\d)", "?", x).split()) for x in (a, b))
    return a == b


def math_equal(a: str, b: str) -> bool:
    """Whether two final answers, without boxes, are equal. Symmetric; never raises."""
    a, b = a.strip(), b.strip()
    if a == b:
        return True
    if max(len(a), len(b)) > MAX_CHARS:
        return _same_text(a, b)
    a, b = _clean(a), _clean(b)
    if not a or not b:
        return False
    if a == b:
        return True
    if _is_words(a) or _is_words(b):
        return re.sub(r"[^a-z]", "", a.lower()) == re.sub(r"[^a-z]", "", b.lower()) != ""
    for x, y in itertools.product(_readings(a), _readings(b)):
        if _agree(x, y):
            return True
        # 62.5% answers 62.5 and 0.625, as the question has it.
        if "%" in a and "%" not in b:
            x = ["(", *x, ")", "/", "100"]
        elif "%" in b and "%" not in a:
            y = ["(", *y, ")", "/", "100"]
        else:
            continue
        if _agree(x, y):
            return True
    return _same_text(a, b)


_MEASURED = re.compile(
    r"\$?[-+]?(\d*\.?\d*)(?:(?:e|\s*\\(?:times|cdot)\s*10\^)\{?([-+]?\d{1,3})\}?)?\$?", re.I
)


def rounds_to(answer: str, gold: str) -> bool:
    """Whether a number with more digits than a measured gold answer rounds to it.

    Minerva's gold answers are rounded results of a computation (4.5e33, 41.8) and carry no mark of
    it but their form: scientific notation, or a decimal of three or more significant digits. Half
    a unit in the last digit of the gold answer is allowed, and at most 1 %, the tolerance of
    Minerva's own grader for small numbers; so 41.83 counts for 41.8 and 41.9 does not. Integers,
    short decimals (1.5) and everything else have to be equal.
    """
    match = _MEASURED.fullmatch(gold.strip())
    if match is None or len(answer) > MAX_CHARS or len(gold) > 40:
        return False
    digits, exponent = match.groups()
    if not exponent and ("." not in digits or len(digits.replace(".", "").lstrip("0")) < 3):
        return False
    try:
        target, value = (
            _Reader(_readings(_clean(x))[0], 0, "positive").answer() for x in (gold, answer)
        )
        while isinstance(value, _Form) and (value.kind == "≈" or value.kind == "=" and value.name):
            value = value.parts[1]
        unit = _power(10, int(exponent or 0) - len(digits.partition(".")[2]))
        return abs(value - target) <= min(unit / 2, abs(target) / 100)
    except _FAILURES:
        return False
