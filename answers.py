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
import math
import re
import zlib
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 1_000  # longer answers are compared as text
MAX_DEPTH = 40  # nested groups, at most nine of Python's thousand frames each
MAX_STEPS = 2_500  # tokens taken in one reading
MAX_BITS = 4_096  # size of an exact number; 100! / 2^50 and 10^100 fit
MAX_UNORDERED = 32  # longer lists are compared in order
TOLERANCE = 1e-9  # relative: far above rounding, far below 1.5 against 1.50001
INFINITY = 1.7e300  # stands for \infty and keeps -\infty apart from it

# ---- cleaning: one spelling for what LaTeX, Unicode and plain text write in many ---------------

_UNICODE = {"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∞": "\\infty "}
_UNICODE |= {"√": " sqrt ", "π": "\\pi ", "∪": "\\cup ", "∈": "\\in ", "’": "'", "′": "'"}
_UNICODE |= {"²": "^{2}", "³": "^{3}", "£": " ", "€": " "}
_UNICODE |= {"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx "}
_UNICODE = str.maketrans(_UNICODE | dict.fromkeys("\u00a0\u2009\u202f~\t\r\n", " "))
_FUNCTIONS = {
    **{"sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "cot": lambda x: 1 / cmath.tan(x)},
    **{"sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x)},
    **{"arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan},
    **{"sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh, "exp": cmath.exp},
    **{"log": cmath.log, "ln": cmath.log, "lg": cmath.log10},  # log alone is natural
}
_TEXT = r"\\(?:text(?:rm|bf|it|normal|sf)?|mathrm|mbox|hbox|rm)\s*\{([^{}]*)\}"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_UNIT = _TEXT.replace("([", "(?:[") + _POWER
_UNITS = re.compile(rf"{_UNIT}(?:(?:\s|[/*·]|\\cdot|\\times|\\[,; ])*{_UNIT})*")
_WORD = rf"\s+(?!(?:and|or|sqrt|{'|'.join(_FUNCTIONS)})\b)[A-Za-z]{{3,}}\b"
_WORD += r"|\s*(?:[ckm]m|[km]g|m[lLs]|ft|lb|oz|hr|Hz|[kM]?eV|k?Pa|k[JN]|in)\b"


def _repeating(match: re.Match) -> str:
    r"""The decimal 0.1\overline{6} as an exact quotient."""
    digits, fixed, period = match[1] + match[2] or "0", match[2], match[3]
    return f"(({digits}{period}-{digits})/{'9' * len(period)}{'0' * len(fixed)})"


# (text without which the rule has nothing to do, pattern, replacement), applied in order.
_RULES = [
    ("\\", r"\\\$|(?<!\\)\\[()\[\]]|\\(?:displaystyle|angle)(?![A-Za-z])", " "),  # money, \( \)
    ("$", r"\$", " "),
    ("\\", r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", ""),
    ("_", r"_\s*\{?\s*" + _TEXT + r"\s*\}?", r"_{\1}"),
    ("\\op", r"\\operatorname\s*\{\s*([A-Za-z]+)\s*\}", r"\\\1 "),
    ("\\mathrm", r"\\mathrm\s*\{\s*([eid])\s*\}", r" \1 "),
    ("\\", r"\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}", ","),
    ("\\", r"\\(?:math(?:bf|bb|cal|it|sf)|boldsymbol|bm|vec|hat)(?![A-Za-z])", " "),
    ("{", _TEXT, None),  # see _clean
    ("\\", r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![A-Za-z])", "°"),
    ("\\prime", r"\^\s*\{?\s*\\prime\s*\}?", "'"),
    ("\\dot", r"\\dot\s*\{\s*(\\?[A-Za-z]+)\s*\}", r"\1˙"),
    ("\\ddot", r"\\ddot\s*\{\s*(\\?[A-Za-z]+)\s*\}", r"\1˙˙"),
    ("", r"(?<=\d)(?:\{,\}|,\s*\\[!,]|\\[,!; ]| )\s*(?=\d{3}(?!\d))", ""),  # thousands: 1{,}234
    ("\\", r"(?<!\\)\\[,;:!> ]|\\q?quad(?![A-Za-z])", " "),
    ("\\over", r"(\d*)\.(\d*)\\over(?:line|bar)\s*\{(\d+)\}", _repeating),
    ("\\", r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
    ("x", r"(?<=\d)\s*x\s*(?=10\s*\^)", "*"),
    ("**", r"\*\*", "^"),
    ("\\div", r"\\div(?![A-Za-z])", "/"),
    (".", r"\b(?:np|numpy|math)\.", ""),
    ("\\", r"\\[dtc](frac|binom)", r"\\\1"),
    ("\\", r"(\\frac|\\binom)\s*(\d)", r"\1{\2}"),
    ("\\", r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    ("\\frac", r"(?<![\d.^_}/*])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}", r"(\1+\2/\3)"),  # mixed
    ("/", r"(?<![\d.^_}/*])(\d+) +(\d+)\s*/\s*(\d+)", r"(\1+\2/\3)"),
    ("U", r"(?<=[)\]}])\s*U\s*(?=[(\[{\\])", r"\\cup "),
    ("", rf"(?<=[\d.)}}°%])(?:{_WORD})(?:(?:{_WORD}|\s*/\s*[A-Za-z]+){_POWER})*{_POWER}\s*$", ""),
    ("", r"\b(?:and|or)\b", ","),
    (",", r",\s*,", ","),
]
_RULES = [(trigger, re.compile(pattern), new) for trigger, pattern, new in _RULES]


@functools.lru_cache(maxsize=4096)
def _clean(text: str) -> str:
    text = text.translate(_UNICODE).strip().rstrip(".").strip()
    for trigger, pattern, new in _RULES:
        if new is None:
            # \text beside other content is a unit; an answer that is all \text is the answer.
            bare = _UNITS.sub(" ", text)
            text = bare if re.search(r"[A-Za-z0-9]", bare) else pattern.sub(r"\1", text)
        elif trigger in text:
            text = pattern.sub(new, text)
    return text.strip(" =").rstrip(" .,")


# ---- reading: tokens, and a parser that computes -----------------------------------------------

_SYMBOLS = "frac binom sqrt pi infty lfloor rfloor lceil rceil begin end".split()
_COMMANDS = frozenset([*_FUNCTIONS, *_SYMBOLS])
_TOKEN = re.compile(
    r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
    r"|\\begin\s*\{[a-z]*\}(?:\s*\{[lcr|\s]*\})?|\\end\s*\{[a-z]*\}"
    rf"|\\?(?:{'|'.join(_FUNCTIONS)}|sqrt|pi|infty)(?![A-Za-z])|sqrt(?=\d)"
    r"|(?:\\[A-Za-z]+|[A-Za-z])[˙']*(?:\s*_\s*(?:\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z0-9]))?'*"
    r"|\\.|\S",
    re.S,
)
_ALIASES = r"""
\leq ≤ \leqslant ≤ \le ≤ \geq ≥ \geqslant ≥ \ge ≥ \lt < \gt > \ne ≠ \neq ≠ \approx ≈ \in ∈ \cup ∪
\pm ± \mp ∓ \langle ( \rangle ) \lbrace \{ \rbrace \} \lvert | \rvert | \vert | \mid | \| |
""".split()
_ALIASES = dict(zip(_ALIASES[::2], _ALIASES[1::2], strict=True))
_ALIASES |= {"\\" + name: name for name in _COMMANDS}
_RELATIONS = frozenset("= < > ≤ ≥ ≠ ≈ ∈ :".split())
_STOP = _RELATIONS | frozenset(") ] } \\} , ; ∪ + - ± ∓ & \\\\ rfloor rceil end".split()) | {""}
_CLOSING = {"(": ")]", "[": ")]", "\\{": ("\\}", "}"), "{": ("}", "\\}")}


class _Unreadable(ValueError):
    """The text is no answer that the parser knows, or it is over a limit."""


_FAILURES = (ArithmeticError, ValueError, TypeError)  # 1 / 0; _Unreadable; a set plus one


@dataclass(eq=False)
class _Form:
    """Anything but one number, by kind: "()", "(]", "[)", "[]" point or interval; "{}" set or list;
    "∪" union; "=", "<", "≤", "≠" relation; ":" ratio; "_" digits and base; "matrix3" by its width.

    `named` marks a relation that only names its right side: x = 5, f(n) = 2n, (x, y) = (1, 2).
    """

    kind: str
    parts: list
    named: bool = False


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
    return math.floor(x if _exact(x) else complex(x).real + TOLERANCE)


def _number(token: str):
    mantissa, _, exponent = token.lower().partition("e")
    if len(exponent) > 4:
        raise _Unreadable("too many digits")
    return Fraction(token)


_CONSTANTS = {"pi": math.pi, "infty": INFINITY, "e": math.e, "i": 1j}


class _Reader:
    """Computes the answer that `tokens` spell, at sample point number `point`."""

    def __init__(self, tokens: list[str], point: int, domain: str):
        self.tokens, self.at, self.steps, self.depth = [*tokens, ""], 0, 0, 0
        self.point, self.domain, self.variables = point, domain, False
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
        """Comma-separated items. With `expand`, an item with ± becomes two."""
        parts = []
        while True:
            start = self.at
            parts.append(self.relation())
            if expand and self.plus_minus:
                self.at, self.sign = start, -1
                parts.append(self.relation())
                self.sign, self.plus_minus = 1, False
            if self.next not in (",", ";"):
                return parts
            self.take()

    def relation(self):
        start, operators = self.at, []
        parts = [self.union()]
        read = self.tokens[start : self.at]  # e may be an eccentricity: e = 1/2
        kinds = "".join("n" if _is_name(t) or t == "e" else t for t in read)
        named = [bool(re.fullmatch(r"n(?:\(n(?:,n)*\))?|\(n(?:,n)+\)", kinds))]
        while self.next in _RELATIONS:
            operators.append(self.take())
            named.append(_is_name(self.next) and self.tokens[self.at + 1] in _STOP)
            parts.append(self.union())
        if "≈" in operators:  # keep the exact value in "pi ≈ 3.14", the number in "x ≈ 3.14"
            keep = operators.index("≈") + 1 + (operators[0] == "≈" and named[0] and self.variables)
            parts, named, operators = parts[:keep], named[:keep], ["="] * (keep - 1)
        if not operators:
            return parts[0]
        if set(operators) == {":"}:
            ratio = [_divide(part, parts[-1]) for part in parts[:-1]]
            return ratio[0] if len(ratio) == 1 else _Form(":", ratio)
        if operators == ["∈"] and named[0]:
            return parts[1]
        if set(operators) == {"="}:
            if not named[0]:
                parts, named = parts[::-1], named[::-1]
            if not all(_same(part, parts[-1]) for part in parts[1:]):
                raise _Unreadable("sides of a chain that differ")
            if _same(parts[0], parts[-1]):
                return parts[0]  # 2 + 3 = 5 stands for 5
            return _Form("=", [parts[0], parts[-1]], named[0])
        if set(operators) <= {">", "≥"}:
            parts, named = parts[::-1], named[::-1]
            operators = ["<" if op == ">" else "≤" for op in operators[::-1]]
        if set(operators) <= {"<", "≤"}:
            if len(parts) == 2 and named[0]:  # x < 2 is (-infinity, 2)
                parts, operators, named = [-INFINITY, *parts], ["<", *operators], [False, *named]
            elif len(parts) == 2 and named[1]:
                parts, operators = [*parts, INFINITY], [*operators, "<"]
            if len(parts) == 3 and named[1]:
                ends = ("[" if operators[0] == "≤" else "(") + ("]" if operators[1] == "≤" else ")")
                return _Form(ends, [parts[0], parts[2]])
        return _Form("".join(operators), parts)

    def union(self):
        parts = [self.sum()]
        while self.next == "∪":
            self.take()
            parts.append(self.sum())
        return parts[0] if len(parts) == 1 else _Form("∪", parts)

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
        sign, first = self.signs(), self.next
        value = self.power()
        if sign < 0:
            value = -value
        while True:
            if self.next == "*":
                self.take()
                value = _bounded(value * self.signs() * self.power())
            elif self.next == "/":
                self.take()
                value = _divide(value, self.signs() * self.power())
            elif self.next in _STOP or (self.next == "|" and self.bars):
                return value
            else:
                factor = self.power()
                if isinstance(factor, _Form) and factor.kind in ("(]", "[)") and _is_name(first):
                    return factor  # "t(0,4]" has lost the sign of membership
                value = _bounded(value * factor)

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
            value = _floor(self.sum()) if token == "lfloor" else -_floor(-self.sum())
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
        angle = name in ("sin", "cos", "tan", "cot", "sec", "csc")
        self.angles += angle
        if self.next in _CLOSING:
            argument = self.primary()
        else:  # sin 2t, ln x^2: all factors up to an operator or the next function
            argument = self.signs() * self.power()
            while not (self.next in _STOP or self.next in "*/|" or self.next in _FUNCTIONS):
                argument = _bounded(argument * self.power())
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
        if self.tokens[self.at : self.at + 3] == ["(", "0", ")"]:  # I(0) is a value, not I * 0
            self.at, name = self.at + 3, name + "(0)"
        self.variables = True
        seed = zlib.crc32(f"{name} {self.point}".encode())
        if self.domain == "integer":
            return 2 + seed % 37
        value = 0.2 + seed / 2**31
        return -value if self.domain == "signed" and seed & 1 else value


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
            if kind == "=" and x.named or kind == "{}" and len(x.parts) == 1:
                return _same(x.parts[-1], y)
            if kind == "_" and not isinstance(y, _Form):  # the question names the base
                return _same(x.parts[0], y)
        return False
    if len(a.parts) != len(b.parts):
        return False
    if kinds[0] in ("{}", "∪", "≠", "=") and len(a.parts) <= MAX_UNORDERED:
        rest = list(b.parts)
        for x in a.parts:
            match = next((i for i, y in enumerate(rest) if _same(x, y)), None)
            if match is None:
                return False
            rest.pop(match)
        return True
    return all(map(_same, a.parts, b.parts))


def _agree(a: list[str], b: list[str]) -> bool:
    """Whether two token lists give the same answer at every sample point."""
    tokens, same, gaps = {*a, *b}, True, []
    # Variables are positive, as in counting and physics: sqrt(x^2) is x. Floors are taken of
    # integers, and an absolute value asks for negative numbers too.
    domain = (
        "integer" if tokens & {"lfloor", "lceil"} else "signed" if "|" in tokens else "positive"
    )
    for point in range({"integer": 12, "signed": 6, "positive": 3}[domain]):
        readers = [_Reader(x, point, domain) for x in (a, b)]
        try:
            x, y = (reader.answer() for reader in readers)
            same = same and _same(x, y)
            if all(isinstance(z, _Form) and z.kind == "=" for z in (x, y)):
                gaps.append([z.parts[0] - z.parts[1] for z in (x, y)])
            elif not same:
                return False
        except _FAILURES:
            return False
        if not any(reader.variables for reader in readers):
            break
    # Two equations are the same when one is the other times a constant: y = 2x and 2x - y = 0.
    return (
        same
        or len(gaps) > 1
        and all(p and q and _close(p * gaps[0][1], q * gaps[0][0]) for p, q in gaps)
    )


def _readings(text: str) -> list[list[str]]:
    """Token lists for a cleaned answer; 100,200 may be one number or two."""
    text = re.sub(r"\\?%|\\?\bpercent\b", "", text)
    merged = text
    if not re.search(r"[()\[\]{}]", text) or not re.search(r"[(\[{][^)\]}]*,", text):
        merged = re.sub(
            r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text
        )
    return [_tokens(t) for t in dict.fromkeys((merged, text))]


def _is_words(text: str) -> bool:
    if not re.fullmatch(r"[A-Za-z\s,.'()\-]+", text):
        return False
    runs = re.findall(r"[A-Za-z]+", text)
    return any(len(r) > 2 and r not in _COMMANDS or r.lower() == "no" for r in runs)


def math_equal(a: str, b: str) -> bool:
    """Whether two final answers, without boxes, are equal. Symmetric; never raises."""
    a, b = a.strip(), b.strip()
    if a == b:
        return True
    if max(len(a), len(b)) > MAX_CHARS:
        return "".join(a.split()) == "".join(b.split())
    a, b = _clean(a), _clean(b)
    if not a or not b:
        return False
    if a == b:
        return True
    if _is_words(a) or _is_words(b):
        return re.sub(r"[^a-z]", "", a.lower()) == re.sub(r"[^a-z]", "", b.lower()) != ""
    percent = ["%" in x or "percent" in x for x in (a, b)]
    for x in _readings(a):
        for y in _readings(b):
            if _agree(x, y):
                return True
            # 62.5% answers 62.5 and 0.625, as the question has it.
            hundredth = ["(", *(x if percent[0] else y), ")", "/", "100"]
            if percent[0] != percent[1] and _agree(hundredth, y if percent[0] else x):
                return True
    return "".join(a.split()) == "".join(b.split())


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
        target, value = (_Reader(_readings(_clean(x))[0], 0, "positive") for x in (gold, answer))
        target, value = target.answer(), value.answer()
        if isinstance(value, _Form) and value.kind == "=" and value.named:
            value = value.parts[1]
        unit = _power(10, int(exponent or 0) - len(digits.partition(".")[2]))
        return abs(value - target) <= min(unit / 2, abs(target) / 100)
    except _FAILURES:
        return False
