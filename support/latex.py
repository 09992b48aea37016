r"""LaTeX of an answer, cut into tokens: stages 1 and 2 of support/answers.py.

    clean(r"$5\frac12 \text{ cm}$")   -> r"(5+1/2)"
    tokenize("(5+1/2)")                -> ["(", "5", "+", "1", "/", "2", ")"]

RULES remove units and layout, one after another. Each has an example, which the tests run.
"""

import cmath
import re

# ---- 1. one spelling ----------------------------------------------------------------------------
_SPELLINGS = r"""
\cdot * \times * \ast * × * · * ⋅ * ∗ * \div / ÷ / − - – - — - ‐ - ‑ - ’ ' ′ ' 。 . 、 , \% % \\ ),(
\cr ),( & , \leq ≤ \leqslant ≤ \le ≤ <= ≤ \geq ≥ \geqslant ≥ \ge ≥ >= ≥ \lt < \gt > \ne ≠ \neq ≠
\equiv = ≡ = \approx = ≈ = \in ∈ \cup ∪ ∨ \vee ∧ \wedge \setminus ∖ \backslash ∖ \pm ± \mp ± \mid |
\vert | \lvert | \rvert | \langle ( \rangle ) \lbrace \{ \rbrace \} ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉
\rceil √ \sqrt \dfrac \frac \tfrac \frac \cfrac \frac \over \frac \dbinom \binom \choose \binom ½
\frac{1}{2} ⅓ \frac{1}{3} ⅔ \frac{2}{3} ¼ \frac{1}{4} ¾ \frac{3}{4} ∅ \emptyset ∞ \infty \varnothing
\emptyset \degree ° º ° \dots … \ldots … \cdots … \dotsc … ⋯ … ⁄ / ⅛ \frac{1}{8} \imath i \jmath j
\AA Å
""".split()
_BLANKS = r"$ £ \pounds € ~ \quad \qquad \displaystyle \small \large \Large \LARGE \huge \angle "
_BLANKS += r"\triangle \mathbf \mathbb \mathcal \mathit \mathsf \boldsymbol \bm \bf \it \vec \hat"
_LETTERS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi "
_LETTERS += "rho sigma tau upsilon phi chi psi omega hbar ell nabla partial infty emptyset bar "
_LETTERS = (_LETTERS + "overline underline tilde").split()
_SPELLINGS = {old: new + " " for old, new in zip(_SPELLINGS[::2], _SPELLINGS[1::2], strict=True)}
_SPELLINGS |= dict.fromkeys([*_BLANKS.split(), *("\\" + sign for sign in "$()[],;:!> ")], " ")
_SPELLINGS |= {chr(0xFEE0 + code): chr(code) for code in range(ord("!"), ord("~"))}  # fullwidth
_SPELLINGS |= {a: f"\\{name} " for a, name in zip("αβγδεζηθικλμνξοπρστυφχψω", _LETTERS)}

FUNCTIONS = {f: getattr(cmath, f) for f in "sin cos tan sinh cosh tanh exp log".split()}
for _f, _g in zip("sin cos tan sinh cosh tanh".split(), "csc sec cot csch sech coth".split()):
    FUNCTIONS["arc" + _f] = FUNCTIONS["ar" + _f] = getattr(cmath, "a" + _f)
    FUNCTIONS[_g] = lambda x, f=FUNCTIONS[_f]: 1 / f(x)
    FUNCTIONS["arc" + _g] = lambda x, f=FUNCTIONS["arc" + _f]: f(1 / x)
FUNCTIONS |= {"ln": cmath.log, "lg": cmath.log10, "arccot": lambda x: cmath.pi / 2 - cmath.atan(x)}
_FUNCTION_NAMES = "|".join(sorted({*FUNCTIONS, "sqrt", "pi", "e", "i"} - {"sec"}))  # sec: seconds

# A text behind a value is a unit if it has a unit word, such as a plural, and no value word.
_UNITS = r"[A-Za-z-]+[^\Wsui]s|[fpnumcdhkMGT]?(?:[msgLlJNWVACFTKH]|Hz|Pa|eV|mol|rad|min)|Å|in(?! )|"
_UNITS += r"ft|yd|mi|lb|oz|hr?|d|yr|mph|sq|cu|sec|deg|erg|st|nd|rd|th|[a-z]*(?:met|lit)(?:er|re)|"
_UNITS += r"[a-z]*gram|foot|feet|inch|mile|yard|pound|ounce|unit|second|minute|hour|day|week|year|"
_UNITS += r"month|dollar|cent|USD|degree|people|person|\w*men|children|gm|increase|[\u4e00-\u9fff]+"
_VALUES = r"least|most|more|less|fewer|over|under|above|below|up|not?|n?or|plus|minus|times \w+|"
_VALUES += r"p\.?m|loss|south|west|multiples?|factorials?|tens|halves|extraneous|rejected|(?:half|"
_VALUES += r"third|quarter|pair|couple|trio|twin|dozen|score|hundred|thousand|\w+illion|(?:four|"
_VALUES += r"fif|six|seven|eigh|nin|ten|eleven|twelf|\w+(?:teen|tie|red|sand|illion))th)s?"

# Patterns of RULES. There, ⟦...⟧ is the content of \text{...}, or words without it.
_INSIDE = r"((?:[^{}]|\{[^{}]*\})*?)"
_TEXT = rf"(?:\\(?:text[a-z]*|mathrm|.box|rm|oper[a-z]*)\s*\{{|(?<![c}}_^])\{{\s*\\rm~){_INSIDE}\}}"
_EXPONENT = r"\^\s*(?:\{\s*-?\d\s*\}|-?\d)"
_POWER = rf"(?:\s*{_EXPONENT})?"
_VALUE = rf"[^⟧]*(?:\b(?i:{_VALUES})\b|\b[kKMB] [a-z]{{3}}|[=约至不负半十百万亿对双打])"
_UNIT = rf"(?=[^⟧]*(?<![A-Za-z])(?:{_UNITS})(?![A-Za-z]))[^⟧]*⟧{_POWER}"
_UNIT = rf"⟦(?!{_VALUE}|(?:[^⟧]*\s)?[-+]?\.?\d){_UNIT}"  # not 5 cm
_UNIT = rf"\s*{_UNIT}(?:[\s/*]*{_UNIT})*"
_AFTER_VALUE = r"(?<=[^\W_]|[.)}\]!%°])"
_ORDINAL = rf"\^\s*\{{?\s*⟦\s*(?:st|nd|rd|th)\s*⟧\s*\}}?(?:\s*⟦(?!{_VALUE})[^⟧]*⟧)?"
# The whole answer, because the letters of 2nd + 1 are variables.
_BARE_ORDINAL = r"\A(\d*1(?=st)|\d*2(?=nd)|\d*3(?=rd)|\d+(?=th))"
_BARE_ORDINAL += rf"[a-z]{{2}}\b(?!{_VALUE})[A-Za-z\s⟦⟧]*\Z"
# Behind the one value of an answer: for all x, where s > -a. Not in: x for x > 1, 0 otherwise.
_CONDITION = r"\A([^⟦]*[^⟦\s,(])[\s,(]*(?:(?:⟦[\s,(]*)?\b(?:for|where)\b|\\forall~)"
_CONDITION += r"(?!.*\b(?:and|or|each|every|otherwise|else)\b)"
_CONDITION += r"(?:[A-Za-z\s⟧]*|(?:[^,;=⟦(]|\([^()]*\))*[<>≤≥≠∈](?:[^,;=⟦(]|\([^()]*\))*)\Z"
_NO_FACTOR = r"(?!\s*(?:[\w.({^]|\\[^}]))"  # no factor follows: in 5 ft 6 in one does
_WORDS = rf"(?<=[\d.)}}%])(\s+(?!(?:mod|{_FUNCTION_NAMES})\b)"
_WORDS += rf"(?:(?:sq|cu)\.?\s+[A-Za-z]+|[A-Za-z]{{3,}})\b(?:[A-Za-z\s/*]|{_EXPONENT})*"
_WORDS += r"|\s*(?:[ckm]m|[km]g|m[lLs]|ft|lb|oz|hr|Hz|k?Pa|k[JN]|[kM]?eV|Å|m(?=/s)|g(?=/cm))\b"
_WORDS += rf"(?:/[A-Za-z]+)?{_POWER}"
_WORDS += r"|[\u4e00-\u9fff]+)\s*\Z"
# Words stay in ⟦⟧, because the product of their letters makes east equal to seat.
_NO_WORDS = rf"(?:{_FUNCTION_NAMES}|[A-Za-z]{{1,2}}(?<![Nn]o))"  # sin(x) is none
_ONLY_WORDS = rf"\A(?!(?>{_NO_WORDS}\b|[\s(),.'-])+\Z)[A-Za-z\s,.'()⟦⟧-]+\Z"
_SPELLING = r"\\(?:[A-Za-z]+|.)|[<>]=|[$&]|[^ -}]"
_MATRIX = r"\s*\{(?:[pb]?(?:small)?matrix|array|cases|aligned|align\*?)\}(?:\s*\{[lcr|\s]*\})?"
_ITEM = r"((?:(?!\\[{}])[^,;∨∧∪±])*)"
_PLUS_MINUS = rf"(?:(?<![^,;∨∧∪±])|(?<=\\[{{}}])){_ITEM}±{_ITEM}"
# \dot x and dx/dt become x'. What x depends on is dropped.
_DOT = r"\\(d?)dot~\s*(?:\{([^{}]+)\}|(\\[A-Za-z]+|[A-Za-z]))"
_LEIBNIZ = r"(\\frac\s*\{\s*)?(?<![A-Za-z\\])d\s*(?:\^(\d)\s*)?(\\?[A-Za-z]+(?:_\w|_\{[^{}]*\})?)"
_LEIBNIZ += r"\s*(?:\([a-z]\)\s*)?(?(1)\}\s*\{|/)\s*d\s*[a-z](?:\s*\^\d)?\s*(?(1)\}|(?![A-Za-z]))"
_CAPITALS = r"(\A|[,;∨∧])\s*[({]?([A-Z])\s?([A-Z])[)}]?(?=\s*(?:[,;∨∧]|\Z))"
_MIXED = r"(?<!\d )(?<![\d.^_}/*])(\d+)(?: *\\frac *\{?(\d+)\}? *\{(\d+)\}| +(\d+) */ *(\d+))"
# n = 5 mod 7 and 5 (mod 7) are residues. 12 mod 7 is a calculation.
_RESIDUE = r"\A(?=.*(?:=|(?:\\p|\(\s*)mod))(?:(?!\d)[\w{}]*\s*=)?(.+?)\(?\s*(?:\\[bp]?)?mod"
_RESIDUE += r"(?:ulo)?~[\s{]*([\w^]+)[\s})]*\Z"
_TURNED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻][", "0123456789-()")
_PREFIX = r"(?i:(?:(?:the )?(?:final )?(?:answer|value|result)|there|it) (?:is|are)\b:?|yes,|"
_PREFIX += r"(?:final )?answer:|all integers(?=[\s⟧]*[a-z]\s*[<>≤≥]))|(?:USD?|EUR|GBP)(?=[\s⟧]*\d)"
_OVER = rf"(?:\{{|\A){_INSIDE}\s*\\(over|choose)~\s*{_INSIDE}(?:\}}|\Z)"

# Each rule: pattern, replacement, an example, and the example after this rule. They are applied in
# order. In a pattern, ~ means the end of a command's name.
RULES = [
    ("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]", "", "5\u200b", "5"),  # invisible
    # Before the spelling of single signs, which removes \, and \! and turns \\ into a new row.
    (r"(?<!\\)\\\\\s*(?=\\end)|(?<=\\\\)\s*\[[\d.]+\w\w\]", "", r"1 \\[4pt] 2", r"1 \\ 2"),
    (r"(?s)\\\\(?!.*(?<!\\)\\end)", r"\\", r"\\frac{1}{4}", r"\frac{1}{4}"),
    (r"(?<=\d)(?:\{,\}|,\s*\\!|\\[,!; ]|\s)\s*(?=\d{3}(?!\d))", "", r"1{,}234\,567", "1234567"),
    (r"\\(?:left|right|[bB]igg?[lrm]?)~\s*\.?", "", r"\left(1, 2\right]", "(1, 2]"),
    (r"(?<=[\d})i])\s*(?:\\approx~|≈)[^,;]*", "", r"2\pi \approx 6.3", r"2\pi"),
    (r"\\mathbb\s*\{?\s*R~\s*\}?|ℝ|\ball real numbers\b", "(-∞,∞)", r"\mathbb R", "(-∞,∞)"),
    (_OVER, r"\\\2{\1}{\3}", r"{9 \choose 4}", r"\choose{9}{4}"),
    (r"&(?= *[=<>])|(?<==) *&|(?<![\\.])[,;.](?= *(?:\\\\|&|\\end))", "", r"x &= 1,\\", r"x = 1\\"),
    (r"\A[ $(\\]*(\d+) *(?:\\times|×) *(\d+)[ $.)\\]*\Z", r"w_{\1×\2}=\1×\2", "3×4", "w_{3×4}=3×4"),
    (r"[⁰¹²³⁴-⁹⁻]+", lambda m: f"^{{{m[0].translate(_TURNED)}}}", "10⁻⁷", "10^{-7}"),
    (r"(?<=\d) ?x ?(?=10\s*\^)", "*", "1.07 x 10^16", "1.07*10^16"),
    (r"(\\not\s*=|(?<=\s)!=)|\.\s?\.\s?\.", lambda m: "≠" if m[1] else "…", "x != 3", "x ≠ 3"),
    (_SPELLING, lambda m: _SPELLINGS.get(m[0], m[0]), r"2 \cdot x", "2 *  x"),
    (r"[.\s\\]+\Z", "", r"5 metres. \\", "5 metres"),
    (r"\bnp\.", "", "np.arcsin(1)", "arcsin(1)"),  # a right answer of Minerva
    (r"\\\{(?= *\\emptyset *\\\})", r"\{w_0,", r"\{\emptyset\}", r"\{w_0,\emptyset\}"),
    (rf"\\\{{ *(?!.*\\\}})\\begin{_MATRIX}|\\begin\{{[ac][al].+?\}}", "[(", r"\begin{cases}", "[("),
    (rf"\\begin{_MATRIX}", "((", r"\begin{array}{c} 1", "(( 1"),
    (rf"(?:\),\(\s*)?\\end{_MATRIX}", "))", r"2 \end{pmatrix}", "2 ))"),
    # Units are in ⟦⟧ before they are removed, and what words mean is known before the units are.
    (r"\bp(?:er\s?cent(?:age)?|ct)\b", "%", "35 percent", "35 %"),
    (_TEXT, r"⟦\1⟧", r"5\text{ cm}", "5⟦ cm⟧"),
    (rf"\A(⟦?)\s*(?:{_PREFIX})", r"\1", "⟦The answer is ⟧5", "⟦ ⟧5"),
    (r"(\A|=)\s*⟦\s*(-?\d[\d.,]*)(?=\s*[A-Za-z][^⟧]*⟧[\s\d^{}]*\Z)", r"\1\2⟦", "⟦9 cm⟧", "9⟦ cm⟧"),
    (_WORDS, r"⟦\1⟧", "120 miles per hour", "120⟦ miles per hour⟧"),
    (_ORDINAL, "", "12^{⟦th⟧} ⟦grade⟧", "12"),
    (_BARE_ORDINAL, r"\1", "12th grade", "12"),
    (_CONDITION, r"\1", "2x⟦ for ⟧x > 0", "2x"),
    (r",? ?(?:⟦[ ,]*(?:or|and) *⟧|\b(?:or|and)\b)", lambda m: "∨∧"["a" in m[0]], "1 or 2", "1∨ 2"),
    (r"(?:\{ *\} *)?\^ *(?:\{ *\\circ *\}|\\circ)|⟦ *degrees? *⟧", "°", r"30^{\circ}", "30°"),
    (rf"\\frac\s*\{{({_UNIT})[\s}}]*\{{({_UNIT})\s*\}}", r"\1/\2", r"\frac{⟦m⟧}{⟦s⟧}", "⟦m⟧/⟦s⟧"),
    (rf"{_AFTER_VALUE}{_UNIT}{_NO_FACTOR}", " ", "5 ⟦W m^{-2}⟧", "5 "),
    (rf"⟦(?!{_VALUE})([^⟧]*)⟧", r" \1 ", "⟦east⟧", " east "),
    (_ONLY_WORDS, lambda m: f"⟦{re.sub('[^a-z,-]', '', m[0].lower())}⟧", "A cat", "⟦acat⟧"),
    # Only values are left. A mixed number is known before a fraction becomes any other value.
    (r"\^\s*(?:\{\s*\\prime\s*\}|\\prime)", "'", r"y^{\prime}", "y'"),
    (_DOT, lambda m: (m[2] or m[3]) + "'" * (1 + len(m[1])), r"\ddot{x}_0", "x''_0"),
    (r"(\\(?:frac|binom)\s*(?:\{[^{}]*\}|\d))\s*(\d)", r"\1{\2}", r"\frac12", r"\frac1{2}"),
    (_MIXED, r"(\1+\2\4/\3\5)", "137 1/2", "(137+1/2)"),
    (r"([\^_])\s*\{\s*(\w)\s*\}(?!\s*[\d.])", r"\1\2", "t^{2}", "t^2"),
    (_LEIBNIZ, lambda m: " " + m[3] + "'" * int(m[2] or 1), r"\frac{d^2 y}{dx^2}", " y''"),
    (r"(?<![^∈∪∨]) ?\]|\[ ?(?![^∪∨])", lambda m: m[0].translate(_TURNED), "]2, 3[", "(2, 3)"),
    # A point first: (0, ±2) is two points, and 1 ± 2 two numbers. The smaller one is first.
    (r"(?<!\w)\(((?=[^()]*,)[^()±]*)±([^()±]*)\)", r"(\1-\2),(\1+\2)", "(0,±2)", "(0,-2),(0,+2)"),
    (_PLUS_MINUS, r"\1-\2,\1+\2", r"x = 1 ± 2", "x = 1 - 2,x = 1 + 2"),
    # What follows becomes the name of a value, like the x of x = 5. So IX is not XI, 5 counts for 5
    # mod 7, and 5 mod 8 does not. A list of residues becomes one set with that name.
    (_CAPITALS, r"\1 w_{\2\3}", "IX", " w_{IX}"),
    (r"\(?(\d+)\s*\)?\s*_\s*\{?(\d+)\}?", r"(b_{\2}=\1)", "(52)_8", "(b_{8}=52)"),
    (_RESIDUE, r"mod_{\2}=\\{\1\\}", r"5\pmod{7}", r"mod_{7}=\{5\}"),
    # Two digits after the colon can be a time of day. As ratios, 2:15 and 4:30 would be equal.
    (r"\A(?!.*:(?:[0-5]\d(?!\d)| ?1\Z))([^:]+):([^:]+)\Z", r"(\1)/(\2)", "3:2", "(3)/(2)"),
]
RULES = [(re.compile(pattern.replace("~", "(?![A-Za-z])")), *others) for pattern, *others in RULES]


def clean(text: str) -> str:
    """Return `text` in one spelling: without units and layout."""
    for pattern, new, *_ in RULES:
        text = " ".join(pattern.sub(new, text).split())
    return text.strip(" =:,")


# ---- 2. tokens ----------------------------------------------------------------------------------
_COMMANDS = {*FUNCTIONS, *"frac binom sqrt pi".split()}
# The tokens that can name a quantity. Other commands can be relations or negations: \to, \not.
NAME = re.compile(
    rf"(?!(?:[ei]|{'|'.join(_COMMANDS)})\Z)[^\W\d_]"
    rf"|\\(?i:(?:var)?(?:{'|'.join(_LETTERS)}))(?![A-Za-z])"
)
_TOKEN = re.compile(
    r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
    rf"|\\?(?:{'|'.join(FUNCTIONS)}|sqrt|pi)(?![A-Za-z])|sqrt(?=\d)"
    r"|(?:\\[A-Za-z]+|[A-Za-z])'*(?:\s*_\s*(?:\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z0-9]))?'*(?:\([0t]\))?"
    r"|\\.|\S"
)


def tokenize(text: str) -> list[str]:
    """Cut a cleaned text into tokens: numbers, names with their indices, commands and signs."""
    tokens = [re.sub(r"[\s{}]", "", t) if "_" in t else t for t in _TOKEN.findall(text)]
    # I(0) becomes I_0, x(t) becomes x, also where it is a product, and x'_0 becomes x_0'.
    tokens = [t.replace("(0)", "_0").replace("(t)", "") for t in tokens]
    tokens = [re.sub(r"('+)(_\w+)", r"\2\1", t) for t in tokens]
    return [t[1:] if t[1:] in _COMMANDS else t for t in tokens if t != "%"]
