r"""Reading LaTeX: the stages "signs" and "notations" give each sign and notation one spelling.

A rule is written in two lines: what it is for, and what it does. Rules run from top to bottom.
"""

from support.grader.rules import Rule, Stage, kind, sub

# Between semicolons: a sign, and the signs of LaTeX and Unicode that it replaces.
_SAME_SIGNS = r"""
* \cdot \times \ast × · ⋅ ∗ ; / \div ÷ ⁄ ; - − – — ‐ ‑ ; ' ’ ′ ; . 。 ; , 、 & ; % \% ; ),( \\ \cr ;
≤ \leq \leqslant \le <= ; ≥ \geq \geqslant \ge >= ; < \lt ; > \gt ; ≠ \ne \neq ;
= \equiv ≡ \approx ≈ ; ∈ \in ; ∪ \cup ; ∖ \setminus \backslash ; \vee ∨ ; \wedge ∧ ; ± \pm \mp ;
| \mid \vert \lvert \rvert ; ( \langle ; ) \rangle ; \{ \lbrace ; \} \rbrace ; \lfloor ⌊ ;
\rfloor ⌋ ; \lceil ⌈ ; \rceil ⌉ ; \sqrt √ ; \frac \dfrac \tfrac \cfrac \over ;
\binom \dbinom \choose ; \frac{1}{2} ½ ; \frac{1}{3} ⅓ ; \frac{2}{3} ⅔ ; \frac{1}{4} ¼ ;
\frac{3}{4} ¾ ; \frac{1}{8} ⅛ ; \emptyset ∅ \varnothing ; \infty ∞ ; ° \degree º ;
… \dots \ldots \cdots \dotsc ⋯ ; i \imath ; j \jmath ; Å \AA
"""
_BLANKS = r"$ £ \pounds € ~ \quad \qquad \displaystyle \small \large \Large \LARGE \huge \angle "
_BLANKS += r"\triangle \mathbf \mathbb \mathcal \mathit \mathsf \boldsymbol \bm \bf \it \vec \hat"
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho "
_GREEK += "sigma tau upsilon phi chi psi omega"
NAMES = [*_GREEK.split(), *"hbar ell nabla partial infty emptyset bar overline underline".split()]
NAMES += ["tilde"]
_SPELLINGS = {}
for _new, *_old in map(str.split, _SAME_SIGNS.split(";")):
    _SPELLINGS |= dict.fromkeys(_old, _new + " ")
_SPELLINGS |= dict.fromkeys([*_BLANKS.split(), *("\\" + sign for sign in "$()[],;:!> ")], " ")
_SPELLINGS |= {chr(0xFEE0 + code): chr(code) for code in range(ord("!"), ord("~"))}  # fullwidth
_SPELLINGS |= {a: f"\\{name} " for a, name in zip("αβγδεζηθικλμνξοπρστυφχψω", NAMES)}
_TURNED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻][", "0123456789-()")

# Building blocks of patterns, each with a text that it matches.
INSIDE = r"((?:[^{}]|\{[^{}]*\})*?)"  # the content of braces: \frac{1}{2}
_SIGN = r"\\(?:[A-Za-z]+|.)|[<>]=|[$&]|[^ -}]"  # \cdot, \,, <=, ×
_OVER = rf"(?:\{{|\A){INSIDE}\s*\\(over|choose)~\s*{INSIDE}(?:\}}|\Z)"  # {9 \choose 4}
_THOUSAND = r"(?<=\d)(?:\{,\}|,\s*\\!|\\[,!; ]|\s)\s*(?=\d{3}(?!\d))"  # {,} in 1{,}234
_SIZE = r"\A[ $(\\]*(\d+) *(?:\\times|×) *(\d+)[ $.)\\]*\Z"  # 3 \times 4
_MATRIX = r"\s*\{(?:[pb]?(?:small)?matrix|array|cases|aligned|align\*?)\}(?:\s*\{[lcr|\s]*\})?"
_SYSTEM = rf"\\\{{ *(?!.*\\\}})\\begin{_MATRIX}|\\begin\{{[ac][al].+?\}}"  # \begin{cases}
_FRACTION = r"(?: *\\frac *\{?(\d+)\}? *\{(\d+)\}| +(\d+) */ *(\d+))"  # \frac{1}{2}, 1/2
_ITEM = r"((?:(?!\\[{}])[^,;∨∧∪±])*)"  # a part of a list: x = 1
_DOT = r"\\(d?)dot~\s*(?:\{([^{}]+)\}|(\\[A-Za-z]+|[A-Za-z]))"  # \ddot{x}
_FUNCTION = r"(\\?[A-Za-z]+(?:_\w|_\{[^{}]*\})?)\s*(?:\([a-z]\)\s*)?"  # v_o(t)
_LEIBNIZ = rf"(\\frac\s*\{{\s*)?(?<![A-Za-z\\])d\s*(?:\^(\d)\s*)?{_FUNCTION}"  # \frac{d^2 y}{dx^2}
_LEIBNIZ += r"(?(1)\}\s*\{|/)\s*d\s*[a-z](?:\s*\^\d)?\s*(?(1)\}|(?![A-Za-z]))"
_CAPITALS = r"(\A|[,;∨∧])\s*[({]?([A-Z])\s?([A-Z])[)}]?(?=\s*(?:[,;∨∧]|\Z))"  # AB in AB, CD
_BASE = r"\(?(\d+)\s*\)?\s*_\s*\{?(\d+)\}?"  # (52)_8
# n = 5 mod 7 and 5 (mod 7) are residues. 12 mod 7 is a calculation.
_RESIDUE = r"\A(?=.*(?:=|(?:\\p|\(\s*)mod))(?:(?!\d)[\w{}]*\s*=)?(.+?)\(?\s*(?:\\[bp]?)?mod"
_RESIDUE += r"(?:ulo)?~[\s{]*([\w^]+)[\s})]*\Z"
_TIME = r"(?!.*:(?:[0-5]\d(?!\d)| ?1\Z))"  # not 2:15, which can be a time of day; not 27:1

# fmt: off
SIGNS = Stage("signs", "Each sign has one spelling, and a matrix is a point of points.", [
    Rule("invisible characters", "`5\u200b` for `5` | `5\u200b1` for `5`",
         sub("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]", "")),
    # Before the spelling of signs, which removes \, and \! and turns \\ into a new row.
    Rule("backslashes", r"`\\frac14` for `.25`, `(1\\[4pt] 2)` for `(1\\ 2)` | `\\frac14` for `4`",
         sub(r"(?<!\\)\\\\\s*(?=\\end)|(?<=\\\\)\s*\[[\d.]+\w\w\]", "",
             r"(?s)\\\\(?!.*(?<!\\)\\end)", r"\\")),
    Rule("thousands", r"`1{,}234\,567` for `1234567` | `(1,234)` for `1234`", sub(_THOUSAND, "")),
    Rule("large brackets", r"`\left(1, 2\right]` for `(1, 2]` | `\left(1, 2\right]` for `(1, 2)`",
         sub(r"\\(?:left|right|[bB]igg?[lrm]?)~\s*\.?", "")),
    Rule("approximations", r"`2\pi \approx 6.3` for `2\pi` | `2\pi \approx 6.3` for `6.3`",
         sub(r"(?<=[\d})i])\s*(?:\\approx~|≈)[^,;]*", "")),
    Rule("all real numbers", r"`\mathbb R` for `(-\infty,\infty)` | `R` for `(-\infty,\infty)`",
         sub(r"\\mathbb\s*\{?\s*R~\s*\}?|ℝ|\ball real numbers\b", "(-∞,∞)")),
    Rule("over, choose", r"`{9 \choose 4}` for `126` | `{4 \choose 9}` for `126`",
         sub(_OVER, r"\\\2{\1}{\3}")),
    Rule("aligned equations",
         r"`\begin{cases} x &= 1, \\ y &= 2 \end{cases}` for `x=1, y=2` | "
         r"`\begin{cases} x &= 1, \\ y &= 3 \end{cases}` for `x=1, y=2`",
         sub(r"&(?= *[=<>])|(?<==) *&|(?<![\\.])[,;.](?= *(?:\\\\|&|\\end))", "")),
    Rule("sizes", r"`3×4` for `3 \times 4` | `4\times3` for `3\times4`",
         sub(_SIZE, r"w_{\1×\2}=\1×\2")),
    Rule("raised digits", "`10⁻²` for `0.01` | `10⁻²` for `100`",
         sub("[⁰¹²³⁴-⁹⁻]+", lambda found: f"^{{{found[0].translate(_TURNED)}}}")),
    Rule("x for times", "`1.07 x 10^3` for `1070` | `4 x 10^2` for `4`",
         sub(r"(?<=\d) ?x ?(?=10\s*\^)", "*")),
    Rule("signs of several signs", "`x != 3` for `x ≠ 3`, `1, ..., n` for `1, …, n` | `x!` for `x`",
         sub(r"(\\not\s*=|(?<=\s)!=)|\.\s?\.\s?\.", lambda found: "≠" if found[1] else "…")),
    Rule("signs", r"`2 \cdot x` for `2x` | `2 + x` for `2x`",
         sub(_SIGN, lambda found: _SPELLINGS.get(found[0], found[0]))),
    Rule("last point", r"`x. \\` for `x` | `x!` for `x`", sub(r"[.\s\\]+\Z", "")),
    Rule("numpy", r"`np.arcsin(1)` for `\pi/2` | `np.arccos(1)` for `\pi/2`", sub(r"\bnp\.", "")),
    Rule("set of the empty set", r"`\{∅\}` for `\{\varnothing\}` | `\{\emptyset\}` for `\emptyset`",
         sub(r"\\\{(?= *\\emptyset *\\\})", r"\{w_0,")),
    kind("vectors, matrices", r"`(1,2)` for `\begin{pmatrix}1\\2\end{pmatrix}`, "
         r"`3\mathbf i-2\mathbf j` for `(3,-2)` | one component: `2i` for `(2,0)`",
         sub(_SYSTEM, "[(", rf"\\begin{_MATRIX}", "((", rf"(?:\),\(\s*)?\\end{_MATRIX}", "))")),
])
NOTATIONS = Stage("notations", "Each fraction, derivative, list and name has one form.", [
    Rule("primes", r"`y^{\prime}+y=0` for `y'+y=0` | `y^{\prime}+y=0` for `y''+y=0`",
         sub(r"\^\s*(?:\{\s*\\prime\s*\}|\\prime)", "'")),
    Rule("dots", r"`\ddot{x}+x=0` for `x''+x=0` | `\dot{x}+x=0` for `x''+x=0`",
         sub(_DOT, lambda found: (found[2] or found[3]) + "'" * (1 + len(found[1])))),
    Rule("fractions of digits", r"`\frac12` for `0.5` | `\frac12` for `12`",
         sub(r"(\\(?:frac|binom)\s*(?:\{[^{}]*\}|\d))\s*(\d)", r"\1{\2}")),
    # Before a fraction becomes any other value.
    Rule("mixed numbers", r"`5 1/2` for `5.5` | `5 \frac{1}{2}` for `2.5`",
         sub(rf"(?<!\d )(?<![\d.^_}}/*])(\d+){_FRACTION}", r"(\1+\2\4/\3\5)")),
    Rule("braces of one letter", "`y^{s}=2x` for `2x` | `2^{3}4` for `2^{34}`",
         sub(r"([\^_])\s*\{\s*(\w)\s*\}(?!\s*[\d.])", r"\1\2")),
    Rule("derivatives", r"`\frac{dy}{dx}=6x` for `y'=6x` | `\frac{dx}{dy}=6x` for `y'=6x`",
         sub(_LEIBNIZ, lambda found: " " + found[3] + "'" * int(found[2] or 1))),
    Rule("turned brackets", "`]2, 3[` for `(2, 3)` | `]2, 3[` for `[2, 3]`",
         sub(r"(?<![^∈∪∨]) ?\]|\[ ?(?![^∪∨])", lambda found: found[0].translate(_TURNED))),
    # A point first: (0, ±2) is two points, and 1 ± 2 two numbers. The smaller one is first.
    Rule("plus or minus", r"`(0,\pm2)` for `(0,2),(0,-2)`, `1 \pm 2` for `3, -1` | `\pm2` for `2`",
         sub(r"(?<!\w)\(((?=[^()]*,)[^()±]*)±([^()±]*)\)", r"(\1-\2),(\1+\2)",
             rf"(?:(?<![^,;∨∧∪±])|(?<=\\[{{}}])){_ITEM}±{_ITEM}", r"\1-\2,\1+\2")),
    # What follows becomes the name of a value, like the x of x = 5. So IX is not XI, 5 counts for 5
    # mod 7, and 5 mod 8 does not. A list of residues becomes one set with that name.
    kind("sizes, capitals", "`CD, AB` for `AB, CD` | "
         r"as written: `4\times3` for `3\times4`, `BA` for `AB`",
         sub(_CAPITALS, r"\1 w_{\2\3}")),
    Rule("bases", "`5` for `5_7` | `5_8` for `5_7`", sub(_BASE, r"(b_{\2}=\1)")),
    kind("bases, residues", "dropped: `5` for `5_7`, "
         r"`5` for `5 \pmod 7` | \bmod calculates: `2 \bmod 5` for `2`",
         sub(_RESIDUE, r"mod_{\2}=\\{\1\\}")),
    kind("ratios", "`4:6` for `2:3` | to one: `27:1` for `27`, `54:2` for `27:1`",
         sub(rf"\A{_TIME}([^:]+):([^:]+)\Z", r"(\1)/(\2)")),
])
# fmt: on
