r"""Write an answer in one spelling. LaTeX, Unicode and plain text have many for the same value.

    clean(r"\dfrac{1}{2}\,\text{ cm}")   -> r"\frac{1}{2}"
    clean(r"1{,}234")                     -> "1234"

RULES is a table, and the tests run its examples. The parser in answers.py decides what the text
means.
"""

import cmath
import functools
import re

_UNICODE = {"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/"}
_UNICODE |= {"√": " sqrt ", "π": "\\pi ", "∪": "\\cup ", "∈": "\\in ", "’": "'", "′": "'"}
_UNICODE |= {"²": "^{2}", "³": "^{3}", "£": " ", "€": " ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}"}
_UNICODE |= {"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "≡": "\\equiv "}
_UNICODE = str.maketrans(_UNICODE | dict.fromkeys("\u00a0\u2009\u202f~\t\r\n", " "))
FUNCTIONS = {f: getattr(cmath, f) for f in "sin cos tan sinh cosh tanh exp log".split()}
FUNCTIONS |= {"arc" + f: getattr(cmath, "a" + f) for f in ("sin", "cos", "tan")}
FUNCTIONS |= {"ln": cmath.log, "lg": cmath.log10, "cot": lambda x: 1 / cmath.tan(x)}
FUNCTIONS |= {"sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x)}
_VALUE_WORDS = (  # words that change a value: a text with one of them is no unit
    "least|most|about|approx[a-z]*|around|roughly|nearly|almost|between|more|less|fewer|greater|"
    "larger|smaller|over|under|above|below|up|not?|without|except|minus|plus|negative|squared|"
    "cubed|factorial|reciprocal|root of|multiples?|twice|double|triple|half|halves|quarters?|"
    "(?:power|divisor|factor)s? of|divisible|or|maybe|perhaps|possibly|per mille|"
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|"
    "eleven|twelve|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth|"
    "millionth|dozen|hundred|thousand|million|billion|trillion)s?"
)
_VALUE_SIGNS = "约至不负半万亿"  # about, at least or most, not, minus, half, 10^4, 10^8
_COMMAND = r"\\(?:text(?:rm|bf|it|normal|sf)?|mathrm|mbox|hbox|rm)\s*\{"
_INSIDE = r"(?:[^{}]|\{[^{}]*\})*"
_TEXT = rf"{_COMMAND}({_INSIDE})\}}"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_NO_UNIT = rf"[^}}]*(?:\b(?:{_VALUE_WORDS})\b(?!-)|[={_VALUE_SIGNS}])"  # at least, Area = 5
_NO_UNIT += r"|(?:[^{}]*\s)?[-+]?\.?\d|[\W\d_]*\}"  # 5 cm, or no letter at all
_UNIT = rf"{_COMMAND}(?!(?i:{_NO_UNIT})){_INSIDE}\}}{_POWER}"
_UNITS = rf"\s*{_UNIT}(?:[\s/*]*{_UNIT})*"
_AFTER_VALUE = r"(?<=[\w.)}\]!%°])"  # a unit follows a value
_NO_FACTOR = r"(?!\s*(?:[\w.({^]|\\(?!approx)[^}]))"  # no factor follows it: in 5 ft 6 in one does
_WORD = rf"\s+(?!(?:and|or|mod|sqrt|{_VALUE_WORDS}|{'|'.join(FUNCTIONS)})\b)[A-Za-z]{{3,}}\b"
_WORD += r"|\s*(?:[ckm]m|[km]g|m[lLs]|ft|lb|oz|hr|Hz|[kM]?eV|k?Pa|k[JN]|in)\b"


def _points(match: re.Match) -> str:
    r"""Write a matrix as a point: (1, 2) for a column or a row, ((1, 2), (3, 4)) for two rows."""
    rows = [row.replace("&", ",") for row in match[2].split(r"\\") if row.strip()]
    return "(" + ",".join(f"({row})" for row in rows) + ")"


def _letters(text: str) -> set[str]:
    r"""Return the letters of a text that can be unknowns: x, \theta, but not \pi, e or \sin."""
    names = re.findall(r"\\[A-Za-z]+|[A-Za-z]", text)
    letters = {x for x in names if len(x) == 1 or x[1:].removeprefix("var").lower() in _LETTERS}
    return letters - {"d", "e", "\\pi", "\\det"}


def _right_side(match: re.Match) -> str:
    r"""Drop the left side of an equation that states a number: \lim_{x \to 0} 2^x = 1 becomes 1.

    The parser cannot compute the left side, so the right side is the answer. An equation for an
    unknown is kept whole: \int_0^a x dx = 2 states nothing about a. A letter is an unknown, except
    the variable of the limit, sum or integral, and names of terms and functions: a_n, f(x).
    """
    left, right = match[1].replace("{vmatrix}", ""), match[2]
    left = re.sub(r"[A-Za-z](?=\s*(?:\([a-z]\)|_\s*\{?\s*[a-z]))", "", left)
    operator = match[1].lstrip().startswith(_OPERATORS)
    others = {*"<>≤≥≠∈∪∨,;"}  # relations and lists state something else
    is_number = not _letters(right) and others.isdisjoint(tokenize(right))
    if operator:
        is_number &= others.isdisjoint(tokenize(left))
    return right if is_number and len(_letters(left)) <= operator else match[0]


_OPERATORS = ("\\lim", "\\sum", "\\prod", "\\int")
_GROUPS = rf"(?:[^={{}}]|\{{(?:[^{{}}]|\{{{_INSIDE}\}})*\}})*"  # no = outside braces
_LEFT_SIDE = rf"\s*(?:\\(?:lim|sum|prod|int|det)~{_GROUPS}|\|\(\([^|]*\)\)\|\s*"
_LEFT_SIDE += r"|\\begin\s*\{vmatrix\}[^=]*\\end\s*\{vmatrix\}\s*)"
_UNCOMPUTED = rf"(?s)(?:\A|(?<==))({_LEFT_SIDE})=(?!\s*(?:=|\Z))(.*)\Z"
_BAR = r"(?:\\[lr]?vert~|(?<!\\)\|)"
_NUMBER = r"((?:[^=|A-Za-z\\]|\\(?:frac|sqrt|pi)~)+)"  # without letters
_REMAINDER = rf"(?:\A|(?<==)){_NUMBER}\\?b?mod~[\s{{]*(\d+)[\s}}]*(?==)"
_WORDS = "|".join(sorted({*FUNCTIONS, "sqrt", "pi", "e", "i"} - {"sec"}))  # 5 \text{ sec}: seconds
_ORDINAL = r"(?<=\d)\s*\^\s*(\{\s*)?COMMAND\s*(?:st|nd|rd|th)\s*\}(?(1)\s*\})"
_TIME = r"\A([^:]*?)(?<![\d.])0?(\d\d?)\s*:\s*([0-5]\d)(?!\.?\d)([^:]*)\Z"
_MATRIX = r"(?s)\\begin\s*\{([pb]?matrix|array)\}(?:\s*\{[lcr|\s]*\})?(.*?)\\end\s*\{\1\}"
_REALS = "(-∞,∞)"
_THOUSANDS = r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,\s*\\[!,]|\\[,!; ]| )\s*\d{3}(?!\d))+"
_WHOLE = r"(?<!\d )(?<![\d.^_}/*])(\d+)"  # the 1 of 1\frac{4}{5}
_VALUE_END = r"(?:(?<=[\d})])|(?<=\\pi))"  # the end of a value, not of a name
_D = r"\s*(?:d|\\partial~)\s*(\\[A-Za-z]+|[A-Za-z])\s*"  # the dy and the dx of dy/dx
_RESIDUE = r"\A(?:(?!\d)[\w{}]*\s*(?:=|\\equiv~))?(.+?)"  # x \equiv 5 in x \equiv 5 (mod 7)
_MODULUS = r"\(?\s*(?:\\[bp]?)?mod(?:ulo)?~[\s{]*([\w^]+)[\s})]*\Z"
_TRAILING = rf"(?<=[\d.)}}%])(?:{_WORD})(?:(?:{_WORD}|\s*/\s*[A-Za-z]+){_POWER})*{_POWER}\s*$"

# Each rule: pattern, replacement, an example, and the example after all rules. They are applied in
# order. In a pattern, TEXT means \text{...} and commands like it, COMMAND means their beginning
# \text{, and ~ means the end of a command's name.
RULES = [
    (r"(?s)\\\\(?!.*(?<!\\)\\end)", r"\\", r"\\frac{1}{4}", r"\frac{1}{4}"),
    (r"\\?\$|(?<!\\)\\[()\[\]]|\\(?:displaystyle|(?:tri)?angle)~", " ", r"\(\angle A\)", "A"),
    (r"\\(?:left|right|[bB]igg?[lrm]?)~\s*\.?", "", r"\left(1, 2\right]", "(1, 2]"),
    (_MATRIX, _points, r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(( 1 ),( 2 ))"),
    (r"\{\s*\\rm~", r"\\rm{", r"5 {\rm cm}", "5"),
    (r"_\s*(?:\{\s*TEXT\s*\}|TEXT)", r"_{\1\2}", r"v_{\text {red}}", r"v_{red}"),
    (r"\\operatorname\s*\{\s*([A-Za-z]+)\s*\}", r"\\\1 ", r"\operatorname{sin}x", r"\sin x"),
    (_ORDINAL, "", r"3^{\text{rd}}", "3"),
    (r"\\mathrm\s*\{\s*d\s*\}", " d ", r"2\mathrm{d}", "2 d"),
    (rf"COMMAND\s*\\?({_WORDS})\s*\}}", r" \1 ", r"\text{ln}2", "ln 2"),
    (r"COMMAND\s*,?\s*and\s*,?\s*\}|\band\b", ",", r"1\text{ and }2", "1,2"),
    (r"COMMAND\s*,?\s*or\s*,?\s*\}|\\(?:lor|vee)~|\bor\b", "∨", r"1\text{ or }2", "1∨2"),
    (r"(?:COMMAND\s*)?\bper ?cent\b\s*\}?", "%", r"8 \text{ percent}", "8 %"),
    (_THOUSANDS, lambda m: re.sub(r"\D", "", m[0]), r"1{,}234\,567", "1234567"),
    (r"(?<!\\)\\[,;:!> ]|\\q?quad~", " ", r"x\;y\quad z", "x y  z"),
    (r"\\(?:cdot|times|ast)~", "*", r"2 \cdot 3", "2 * 3"),
    (rf"{_AFTER_VALUE}{_UNITS}{_NO_FACTOR}", " ", r"5\,\mathrm{W\,m^{-2}}", "5"),
    (rf"\A{_UNITS}(?!\s*(?:=\s*COMMAND\D*\Z|COMMAND|[,;^]|\Z))", " ", r"\text{Area} = 5", "5"),
    (r"TEXT", r" \1 ", r"\text{east}", "east"),
    (r"\\mathbb\s*\{?\s*R~\s*\}?|\ball real numbers\b", _REALS, r"\mathbb{R}", r"(-∞,∞)"),
    (r"\\(?:math(?:bf|bb|cal|it|sf)|boldsymbol|bm|vec|hat)~", " ", r"a \vec{v}", "a  {v}"),
    (r"\\\{\s*\\\}", r"\\emptyset ", r"\{ \}", r"\emptyset"),
    (r"(?:\{\s*\}\s*)?\^\s*\{?\s*\\circ\s*\}?|\\degrees?~|°", " ", r"30^{\circ}", "30"),
    (r"\^\s*\{?\s*\\prime\s*\}?", "'", r"y^{\prime}", "y'"),
    (r"\\(d?)dot\s*\{\s*(\\?[A-Za-z]+)\s*\}", r"\2˙\1˙", r"\ddot{\theta}_1", r"\theta˙d˙_1"),
    (r"(?<=\d)\s*x\s*(?=10\s*\^)", "*", "3 x 10^8", "3*10^8"),
    (r"\\div~", "/", r"1 \div 2", "1 / 2"),
    (r"\b(?:np|numpy|math)\.", "", "np.sin(x)", "sin(x)"),
    (r"\\[dtc](frac|binom)", r"\\\1", r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (rf"\\frac\s*\{{{_D}\}}\s*\{{{_D}\}}", r"\1'_{\2}", r"\frac{dy}{dx}", "y'_{x}"),
    (rf"(?<!\w)(\()?{_D}(?(1)\)\s*)/\s*(?(1)\(){_D}(?(1)\))(?!\w)", r"\2'_{\3}", "dy/dx", "y'_{x}"),
    (r"\{([^{}]*)\\choose~([^{}]*)\}", r"\\binom{\1}{\2}", r"{4 \choose 2}", r"\binom{4 }{ 2}"),
    (r"(\\frac|\\binom)\s*(\d)", r"\1{\2}", r"\frac 1{x}", r"\frac{1}{x}"),
    (r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", r"\frac{1}2", r"\frac{1}{2}"),
    (_WHOLE + r"\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}", r"(\1+\2/\3)", r"1\frac{4}{5}", "(1+4/5)"),
    (_WHOLE + r" +(\d+)\s*/\s*(\d+)", r"(\1+\2/\3)", "137 1/2", "(137+1/2)"),
    (r"\(\s*(\d+)\s*\)\s*_", r"\1_", "(52)_8", "52_8"),
    (r"(?<=[)\]}])\s*U\s*(?=[(\[{\\])", r"\\cup ", "(1,2)U(3,4)", r"(1,2)\cup (3,4)"),
    (r"\A[a-z](?=\([^()]*\]\Z|\[[^][]*\)\Z)", "", "t(0,4]", "(0,4]"),  # lost the sign of membership
    (_TRAILING, "", "120 miles per hour", "120"),
    (r",\s*(?=[,∨])", "", "1, 2, and 3", "1, 2, 3"),
    (_VALUE_END + r"\s*\\approx~(?:\([^()]*\)|[^,;∨])*", "", r"\pi \approx 3.1", r"\pi"),
    (r"\\approx~|\A\\sim~", "=", r"x \approx 3.1", "x = 3.1"),
    # The modulus becomes a name, like the x of x = 5. So 5 counts for 5 mod 7, as it counts for
    # x = 5. 5 mod 8 does not count for 5 mod 7, as y = 5 does not count for x = 5. A list of
    # residues becomes one set with that name.
    (_RESIDUE + _MODULUS, r"mod_{\2}=\\{\1\\}", r"5\pmod{7}", r"mod_{7}=\{5\}"),
    (_UNCOMPUTED, _right_side, r"\sum_{k=1}^{9} k = 45", "45"),
    (_BAR + _NUMBER + _BAR, r"\\sqrt{(\1)^{2}}", "|3-5|", r"\sqrt{(3-5)^{2}}"),
    (_REMAINDER, r"\1-\2\\lfloor(\1)/\2\\rfloor", r"7 mod 5=2", r"7 -5\lfloor(7 )/5\rfloor=2"),
    # The hour of a time becomes a name: as ratios, 2:15 and 4:30 would be equal.
    (_TIME, r"clock_{\2}=(\1\2)/(\3\4)", "4:30", "clock_{4}=(4)/(30)"),
    (r"\A([^:]+):([^:]+)\Z", r"(\1)/(\2)", "3:2", "(3)/(2)"),
]
# Words that change a value. Read as variables, the letters of "0 at least" would make it zero.
UNREAD = re.compile(rf"(?<![A-Za-z\\{{])(?![A-Z]{{2}})(?i:{_VALUE_WORDS})(?![A-Za-z])")


_ABBREVIATIONS = {"TEXT": _TEXT, "COMMAND": _COMMAND, "~": "(?![A-Za-z])"}
for _short, _long in _ABBREVIATIONS.items():
    RULES = [(pattern.replace(_short, _long), *others) for pattern, *others in RULES]
RULES = [(re.compile(pattern), *others) for pattern, *others in RULES]


@functools.lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """Return `text` in one spelling: without units and layout."""
    text = re.sub(r"(?<!\.)\.\s*\Z", "", text.translate(_UNICODE)).strip()
    for pattern, new, *_ in RULES:
        text = pattern.sub(new, text).strip()
    text = text.strip(" =:")
    return text if text.endswith("...") else text.rstrip(" .,")  # 1, 2, ... is an infinite list


_SYMBOLS = "frac binom sqrt pi infty lfloor rfloor lceil rceil emptyset".split()
COMMANDS = frozenset([*FUNCTIONS, *_SYMBOLS])
_LETTERS = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau
upsilon phi chi psi omega hbar ell nabla partial sup inf max min gcd lcm det dim
deg Re Im Pr bar overline underline tilde widehat
""".split()
# The tokens that can name a quantity. Other commands can be relations or negations: \to, \not.
NAME = re.compile(
    rf"(?!(?:[ei]|{'|'.join(COMMANDS)})\Z)[^\W\d_]"
    rf"|\\(?i:(?:var)?(?:{'|'.join(_LETTERS)}))(?![A-Za-z])"
)
_TOKEN = re.compile(
    r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?(?:\s*_\s*(?:\d+|\{\s*\d+\s*\}))?"
    rf"|\\?(?:{'|'.join(FUNCTIONS)}|sqrt|pi|infty)(?![A-Za-z])|sqrt(?=\d)"
    r"|(?:\\[A-Za-z]+|[A-Za-z])(?:˙d?˙)?'*(?:\s*_\s*(?:\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z0-9]))?'*"
    r"|[<>]=|(?<![\d)}\]!])!=|\\.|\S",
    re.S,
)
_ALIASES = r"""
\leq ≤ \leqslant ≤ \le ≤ <= ≤ \geq ≥ \geqslant ≥ \ge ≥ >= ≥ \lt < \gt > \ne ≠ \neq ≠ != ≠ ∞ infty
\equiv = \in ∈ \cup ∪ \pm ± \mp ∓ \langle ( \rangle ) \lbrace \{ \rbrace \} \varnothing emptyset
""".split()
_ALIASES = dict(zip(_ALIASES[::2], _ALIASES[1::2], strict=True))
_ALIASES |= {"\\" + name: name for name in COMMANDS}


def tokenize(text: str) -> list[str]:
    """Cut a cleaned text into tokens: numbers, names with their indices, commands and signs."""
    tokens = [re.sub(r"[\s{}]", "", t) if "_" in t else t for t in _TOKEN.findall(text)]
    return [_ALIASES.get(token, token) for token in tokens]
