"""The grader: what it accepts, what it refuses, and that nothing makes it slow or raises."""

import random
import sys

import pytest
import spellings
from spellings import boxed

from reward import extract_answer, is_correct, load_reward, math_equal, math_reward
from support import answers, latex
from support.errors import RewardError

needs_benchmarks = pytest.mark.skipif(
    not spellings.BENCHMARKS.is_dir(), reason="STAPO_BENCHMARKS names no folder"
)

EQUAL = r"""
\frac12 | .5
1\frac{4}{5} | 1.8
11,\! 111,\! 111,\! 100 | 11111111100
1.2 \times 10^{-3} | 1.2*10^-3
17.5\% | 17.5
62.5% | 0.625
\$18.90 | 18.9
5 | $5.$ | 5\ \mathrm{kg}\cdot\mathrm{m}/\mathrm{s}^2 | 5 \text{ 元} | --5 | 5 = x
5 | \overline{AB} = 5 | \{5\} | \text{Distance} = \text{5 km} | S_{10} ≡ 5 (mod 7)
15 | 15\mbox{ cm}^2 | 5 \text{ cm} \times 3 \text{ cm}
3.8\times 10^{33}\,\mathrm{erg\,s^{-1}} | 3.8e33
4 \text{ cm}, 6 \text{ cm}^2 | 4, 6
6 \text{ three-digit numbers} | 6
\text{-}5 | -5
\sqrt{12} | 2\sqrt3
5 \sqrt[3]{4} | 5\cdot 4^{1/3}
\sqrt{-4} | 2i
\frac{100!}{2^{50}} | 100!/2^50
\binom{2n}{n} | \frac{(2n)!}{(n!)^2}
\frac{d !}{2 k(d-k) !} | \frac{d!}{2k \cdot (d-k)!}
2^3^2 | 512
\frac{n(n+1)}{2} | \frac{n^2+n}{2}
(n-2) 2^{n} | 2^n n - 2^{n+1}
e^{i\pi} | -1
\sin \pi | 0
(1+\sqrt2)^{30} | (3+2\sqrt2)^{15}
(5/2)! | \frac{15\sqrt\pi}{8}
200!/198! | 39800
\sin(x) y | y \sin x
\ln 2 + i\pi / 3 | \frac{\pi}{3} i + \ln(2)
3 | \log_2 8 | 3^{\text{rd}}
\ln^{-1} 2 | 1/\ln 2
\sin ^{2} \theta | 1 - \cos^2(\theta)
np.arcsin(10/13) | \sin^{-1}\left(\frac{10}{13}\right)
\operatorname{sin} 2x | 2 \sin x \cos x
\ln 2 - i | \mathrm{ln}\,2-\text{i} | \text{ln}(2) - \mathrm{i}
5 | 5\text{ sec}
\frac{1}{2}(\exp{a*t} + \exp{-a*t}) | \cosh(at)
\sqrt{x^2} | x
(3/7)^{1300} (11/5)^{900} | (11/5)^{900} (3/7)^{1300}
\lfloor n/3 \rfloor + 1 | \lfloor (n+3)/3 \rfloor
\lfloor 5.5 \rfloor + \lfloor \log_{10} 1000 \rfloor | 8
-\lfloor -x \rfloor | \lceil x \rceil
\mathbf{v} + \vec{a} t | v + a t
m l \ddot{\theta}_1 - \dot{x} | -\dot{x} + l m \ddot{\theta}_{1}
m (dv/dt + 1) | m ((d v)/(d t)) + m
y^{\prime}+r y-r x(t)=0 | y' = r x(t) - r y
I(0) + 1 | 1 + I(0)
y = 2x+1 | 2x - y + 1 = 0
(x,y) = (1,2) | (1,2)
f(x)=x, f(x)=-x | f(x)=-x, f(x)=x
12 | f(2)+f(3) = 12 | 12^{\mathrm{th}} \text{ day}
4 | AB=4\text{ cm} | NO = 4
\angle PSQ = 145^\circ | 145
m+n = 20+17 = 37 | 37
[ABC] = 84 | 84
\sin\theta = \frac{3}{5} | \frac35
x=y=z=3 | x=3, y=3, z=3
\sqrt2 | x = \sqrt{2} \approx 1.41 | \sqrt{2} \text{ m} \approx 1.41 \text{ m}
3.14 | AB \approx 3.14 | ≈ 3.14
(1/3, 2/3) \approx (0.33, 0.67) | (1/3, 2/3)
(1, 2) | \left( 1,2 \right)
-(1, 2) | (-1, -2)
3, 1, 2 | \{1, 2, 3\} | 1, 2, and 3
\{1\pm\sqrt{5},-2\} | -2, 1+\sqrt5, 1-\sqrt5
x = 1 \text{ or } 2 | x=1 \text{ or } x=2
$64$,$125$ | 125, 64
x \in [-2,7] | -2 \le x \le 7
k \geqslant 2 | [2, \infty)
x < 2 | (-\infty, 2)
0 <= x < 1 | [0,1)
x < -\infty | (-\infty, -\infty)
x != 2 | x \ne 2
(-\infty, 0) \cup\{1\}. | \{1\} ∪ (-∞, 0)
a < 0 \text{ or } a = 1 | (-\infty,0)\cup\{1\}
x \in \mathbb{R} | (-\infty,\infty)
\text{all real numbers} | \mathbb R
\{\} | \varnothing
\begin{pmatrix} 1/5 \\ 2 \end{pmatrix} | \begin{bmatrix} 0.2 \\ 2 \end{bmatrix}
\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix} | \begin{bmatrix}-1&0\\0&-1\end{bmatrix}
\frac{1}{5}\begin{pmatrix} 1 \\ -18 \end{pmatrix} | \begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}
-\left(\begin{array}{cc} 1 & 0 \end{array}\right) | \begin{pmatrix} -1 & 0 \end{pmatrix}
17_9 | 17
(52)_8 | 52_8
\text{Evelyn} | evelyn
\text{(C)} | C
\text{MR} = \text{SRMC} | MR=SRMC
\text{Profit} = \text{Revenue} - \text{Cost} | Profit + Cost = Revenue
735 \pmod{1000} | 735
5 \ (\text{mod } 7) | 5 \bmod 7
N \equiv 5 \pmod{10^3} | 5 mod 10^3
n \equiv 1, 3 \pmod 8 | 3, 1
n \bmod 2 | n \pmod{2}
\text{north-west} | Northwest
2 | |3-5| = 2 | 17 \bmod 5 = 2 | r = 2^{10} \bmod 7 = 1024 \bmod 7 = 2
\left|2-\sqrt{5}\right| | \sqrt5-2
|-10^{20}| | 10^{20}
1 | \lim_{x \to 0} \frac{\sin x}{x} = 1 | \lim_{\theta \to 0} \frac{\sin \theta}{\theta} = 1
L = \lim_{n\to\infty} a_n = \frac12 = 0.5 | 0.5
\int_0^1 x \,\mathrm{d}x = \frac{1}{2} | 1/2
-2 | \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix} = -2
-2 | \det \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} = -2
2:3 | 4:6
09:30 | 9:30
10:30 \text{ a.m.} | 10:30 | 10:30 \text{ AM}
12 | 12 \text{ divisors} | 12 \text{ factors} | 12 divisors
20\% | 20\% \text{ increase} | 20\% \text{ increased}
3 | 3 \text{ km north} | 3 \text{ km north-west} | 3 \text{ km NorthEast}
\pm a m | \pm am
\begin{pmatrix} 2ma \\ 0 \end{pmatrix} | \begin{bmatrix} 2am \\ 0 \end{bmatrix}
2amp | 2pma
12 \text{ marbles} | 12 \text{ decks}
1:20 | \frac{1}{20}
\\left( 3, \\frac{\\pi}{2} \\right) | \left( 3, \frac{\pi}{2} \right)
\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix} | \begin{pmatrix} 1 \\ 2 \\ \end{pmatrix}
"""
DIFFERENT = r"""
2 | \mathrm{ln}\,2 | \text{arctan}(2) | 2\text{ pi} | 2\text{i}
1.5 | 1.50001
\pi | 3.1415927
10^{100} | 10^{100}+1
\frac13 | 0.333333333333
2^{10} | 2^{1}0
-2 | \sqrt{-4} | \det \begin{pmatrix} x & 2 \\ 3 & 4 \end{pmatrix} = -2
1 | \frac{1}{0} | NaN | 1_000 | \infty^0 | \lfloor 0.9999999999 \rfloor | \lceil \{1\} \rceil
3!! | 720
n^2! | (n^2)! | n^{(2!)}
(1,2) | (2,1) | [1,2] | (1,2]
\{1,1\} | \{1,2\}
1,2 | 1,2,3
6 | \{5, 6\} | 2 3 | {2}{3} | 6 \text{ one-hundredths}
\{\varnothing\} | \varnothing
x | |x| | y | \dot{x} | x = y | x = \sum_{k=1}^{2} k =
\bar{z} | z
0 | I(0) | \infty - \infty | 0 \cdot \infty | \lfloor m/50 \rfloor \lfloor n/50 \rfloor
0 | 0 \text{ At Most} | \text{at least} \cdot 0 | 0 \Rightarrow x
17_9 | 17_8
(52)_8 | 42
101_1 | 101
1:2:3 | 1:3:2
4:30 | 4.5 | 2:15
(2:15) | (4:30)
2:15 PM | 4:30 PM
10:30 AM | 10:30 PM
5 \text{ a.m.} | 5 \text{ p.m.}
20\% \text{ increase} | 20\% \text{ decrease} | 20% decrease
\text{a loss of } \$5 | \$5 \text{ profit} | a gain of 5
n \text{ is even} | n \text{ is odd}
2 | \text{all powers of } 2 | \text{a power of } 2 | \text{divisors of } 2
3 | \text{numbers divisible by } 3 | \text{factors of } 3
3 \text{ km east} | 3 km west
30 \text{ north of east} | 30 \text{ south of east} | 30 \text{ north of west}
2 | 2^{nd} | 2 {{}{}} | n \bmod 5 = 2 | 17 \bmod 0 = 2 | |x| = 2 | |x-3| = 2 | |-3 < 2| = 2
2 | P(1|2) = 2 | \lim_{x \to 0} x \ne 2 | \lim_{x \to 0} x = 2 \le 3 | \lim_{x \to 0} x \le 1 = 2
2 | \int_0^a x \,dx = 2 | \int_0^\alpha x \,dx = 2
3 | \frac{3^{\text{rd}}}{2} | 1=2=3 | x = 2 = 3 | \pi = 3 | 2 1\frac{1}{2} | \lim_{x \to a} x = 3
3 | \lim_{x \to 0} \frac{\sin ax}{x} = 3 | \int_0^1 x \,dx = 2 = 3 | 3 ] 4
y=2x | x=2y
2 + 2 = 5 | 2 + 2 = 6
SRMC | MR=SRMC | \text{MR} = \text{SRMC}
5 | 2x = 5 | x^2 = 5 | x \not= 5 | \lfloor 5.5 \rceil | \lfloor (1,2) \rfloor | 5 \text{ or more}
5 | 5 \text{万} | \text{5 or 6} | 5 \text{\text{ at least } cents} | \text{Area} 5 = 6
5 | \mbox{ - } 5
5 | 12 \pmod 7 | \begin{vmatrix} x & 1 \\ 2 & 3 \end{vmatrix} = 5 | 2 \equiv 5 \pmod 7
5 | x \not\equiv 5 \pmod 7 | 0.05
2^x = \pi | 2^x
AB = CD | CD
f(2) = 5 | f(3) = 5
x=y=z=1 | x=y=1
f(x)=x | f(z)=y
f(x)=x+a | f(a)=a+x
f(x,y)=x-y | f(y,x)=x-y
\approx 3.14 | 3.15
36 \approx 37 | 37
x > 2 | x \ge 2
x >= 2 | x <= 2
x \ne 2 | x < 2
[1,2] | 2x \in [1,2]
1 < 2x < 4 | (1,4)
x<2 | y=2
a < 0 \text{ or } b = 1 | (-\infty,0)\cup\{1\}
a < 0 \text{ and } a > 1 | (-\infty,0)\cup(1,\infty)
(1,2) \cup (3,4), (5,6) | (1,2), (3,4), (5,6)
(4 \text{ or } 6) | (4, 6)
\mathbb{R} \setminus \{2\} | \mathbb{R}
-(\infty, 0) | (-\infty, 0)
\infty | 2 \infty | 1.7 \cdot 10^{300}
2[1,2] | [2,4]
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix} 2 & 1 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix} 1 & 2 & 3 & 4 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}
\begin{bmatrix} 1 & 2 \\ 3 & 4 & 5 & 6 \end{bmatrix} | \begin{bmatrix} 1&2\\3&4\\5&6 \end{bmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix}\begin{pmatrix} 1 \\ 2 \end{pmatrix} | ((1,2),(2,4))
\begin{pmatrix} 1 \\ 2 \end{pmatrix}^2 | \begin{pmatrix} 1 \\ 4 \end{pmatrix}
\lfloor n/2\rfloor | \lceil n/2\rceil
\lfloor \log_2 n \rfloor + 1 | \lceil \log_2 n\rceil
\lfloor (v+3)/99991\rfloor | \lfloor (v+4)/99991\rfloor
\lfloor \log_2 (-n) \rfloor | \lfloor \log_2 n \rfloor
x 2 | 2x
1 234 567 8 | 12345678
5^\circ 30' | 150
50\% 20 | 1000
\sin 2 3 | \sin 6
12 \text{ out of } 15 | 180 | 12 \text{ in } 15
5 ft 6 in | 6 ft 5 in
\sqrt{2} \text{ ft } 3 \text{ in} | 3\sqrt2
\text{at least } 5 | \text{at most } 5
4, 6, \text{none} | 4, 6
x = \text{5} + 1 | x = 1
5 \text{ base } 8 | 40
5 \pmod 7 | 5 \bmod 8 | 35
x \equiv 1,3 \pmod 7 | 3,1 \pmod 8
17 | 17 \bmod 5 = 17 | 17 \bmod 5 = 2
2x \equiv 4 \pmod 7 | 4
|3-5| = 7 | 7
|3-10000000003| | 10000000001
3|12|24 | 864
1, 2 | \lim_{x \to 0} x = 1, 2 | 1, 2, ...
\sum_{k=1}^{n} k = 55 | 55
\lim_{x \to 0} 2^x = \theta | \theta
\int_0^1 x \,dx = \frac12 = 0.6 | 0.6
n \bmod 2 | n
n \bmod m | m \bmod n
\text{MR} = \text{SRMC} | MR = SRAC
\text{MR} > \text{SRMC} | MR = SRMC
5 ? 3 | 3 ? 5
1 \\ 2 | 12
17.%5 | 17.5%
33.5 percent | 3.35
r^2_1 | r_2^1
\frac{dy}{dx} | \frac{y}{x} | \frac{dy}{dt}
\int x dx | x \int dx
east | seat
\text{no} | on
\quad | \;
(1,234) | 1234
abc | -abc | a, b, c
\text{east0} | \text{east}
"""


VALUE_WORDS = """
least most about approximately around roughly nearly almost between more less fewer greater larger
smaller over under above below up not no without except minus plus negative squared cubed factorial
multiple twice double triple half quarter perhaps maybe possibly zero one two three four five six
seven eight nine ten third fifth tenth hundredth dozen hundred thousand million billion trillion
""".split()


def pairs(table: str) -> list[tuple[str, str]]:
    """The first answer of each line with each of the others."""
    rows = [line.split(" | ") for line in table.strip().splitlines()]
    return [(first.strip(), other.strip()) for first, *others in rows for other in others]


@pytest.mark.parametrize("rule", latex.RULES, ids=[rule[2] for rule in latex.RULES])
def test_cleaning_rule(rule, monkeypatch):
    """Each rule's example is cleaned as the table says, and not without the rule."""
    _, _, before, after = rule
    assert latex.clean.__wrapped__(before) == after
    monkeypatch.setattr(latex, "RULES", [other for other in latex.RULES if other is not rule])
    assert latex.clean.__wrapped__(before) != after


@pytest.mark.parametrize("a, b", pairs(EQUAL))
def test_equal(a, b):
    assert math_equal(a, b) and math_equal(b, a)


@pytest.mark.parametrize("a, b", pairs(DIFFERENT))
def test_different(a, b):
    assert not math_equal(a, b) and not math_equal(b, a)


@pytest.mark.parametrize("word", VALUE_WORDS)
def test_a_word_that_changes_the_value_is_no_unit(word):
    assert not math_equal(rf"5 \text{{ {word}}}", "5") and not math_equal(f"0 {word}", "0")
    assert not math_equal(rf"\text{{{word} }} 5", "5")


@pytest.mark.parametrize(
    "response, answer",
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{1} and \fbox {2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{1} \boxed{\frac{2}{3}", "1"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        (r"\boxed{5}" + "x" * 500_000, "5"),
        ("x" * 500_000 + r"\boxed{5}", "5"),
        (r"\boxed{4}" + "\nAnswer: 5", "4"),
        (r"\boxed{4", None),
        (r"\boxed{4} no, \boxed{ }", None),
        ("the answer is 4", None),
        ("Answer: 4", None),
        ("", None),
    ],
)
def test_extract_answer(response, answer):
    assert extract_answer(response) == answer


def test_an_earlier_box_never_counts():
    assert not is_correct(r"\boxed{4} no, \boxed{5}", "4")
    assert not is_correct(r"\boxed{4} no, \boxed{}", "4")
    assert is_correct(r"\boxed{4}", r"\boxed{4}") and is_correct(r"\boxed{4}", "$4$")


def test_rounded_gold_answers():
    right = {"41.8": ["41.83", "x = 41.83"], "4.5e33": [r"4.4967 \times 10^{33}"]}
    right |= {"3e8": ["299792458"]}
    right |= {"1.6": [r"x = \sqrt{2.5} ≈ 1.60", r"\sqrt{2.5} \text{ m} \approx 1.58 \approx 1.6"]}
    wrong = {"41.8": ["41.9", "41.7", "41.8 + 0.01i", r"41.83 \text{ at least}"]}
    wrong |= {"4.5e33": ["4.6e33", "4.5e32"], "326.5": ["327"], "1.5": ["1.50001"]}
    wrong |= {"1000": ["1001"], r"\frac13": ["0.3334"], "37": [r"36.7 \approx 37"]}
    wrong["3e8"] = ["3.1e8"]
    wrong["1.6"] = [r"\sqrt{2.5}", r"\sqrt{2.5} \approx 1.5", r"1.66 \approx 1.6", r"7 \approx 1.6"]
    wrong["1.6"] += [r"2, \sqrt{2.5} \approx 1.6", r"x > \sqrt{2.5} \approx 1.6"]
    for table, expected in ((right, True), (wrong, False)):
        for gold, spelt in table.items():
            for answer in spelt:
                assert is_correct(boxed(answer), gold) is expected, (answer, gold)


def test_rewards():
    assert math_reward(boxed("2/4"), "0.5") == 1.0 and math_reward(boxed("2/3"), "0.5") == -1.0


def test_a_reward_file_imports_modules_beside_it(tmp_path, monkeypatch):
    """A file beside it with the name of another module, here of Python's, does not replace that."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "points_beside.py").write_text("import numpy\nPOINTS = numpy.float32(0.25)")
    (tmp_path / "colorsys.py").write_text("raise ValueError('the wrong one')")
    own = "import colorsys\nimport points_beside\ndef f(text, row): return points_beside.POINTS"
    (tmp_path / "own.py").write_text(own)
    value = load_reward(f"{tmp_path}/own.py:f")("", {"row": {}})
    assert value == 0.25 and type(value) is float  # any real number will do


def test_a_reward_that_takes_a_column_out_finds_it_in_the_next_response(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own.py").write_text("def f(text, row): return float(text == row.pop('answer'))")
    reward, problem = load_reward(f"{tmp_path}/own.py:f"), {"row": {"answer": "5"}}
    assert [reward(text, problem) for text in "565"] == [1, 0, 1]


@pytest.mark.parametrize(
    "line, message",
    [
        ("return row['answers']", r"KeyError\('answers'\) at .*own.py, line 2$"),
        ("raise SystemExit(3)", r"SystemExit\(3\) at .*own.py, line 2$"),
        ("return None", "returned None, which is no finite number$"),
        ("return '1'", "returned '1', which is no finite number$"),
        ("return float('nan')", "returned nan, which is no finite number$"),
        ("return 1 +", r"cannot be imported: SyntaxError\(.*own.py"),
    ],
)
def test_what_goes_wrong_in_a_reward_is_one_line(tmp_path, monkeypatch, line, message):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own.py").write_text(f"def f(text, row):\n    {line}\n")
    with pytest.raises(RewardError, match=f"--reward .*own.py:f: {message}") as error:
        load_reward(f"{tmp_path}/own.py:f")("", {"row": {}})
    assert "\n" not in str(error.value)


def test_a_reward_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own.py").write_text("f = 1")
    for spec, message in (
        (f"{tmp_path}/own.py:f", "has no function f"),
        (f"{tmp_path}/other.py:f", r"is no Python file \(FILE.py:FUNCTION\)"),
        ("own", r"own is no Python file \(FILE.py:FUNCTION\)"),
    ):
        with pytest.raises(RewardError, match=message):
            load_reward(spec)


@needs_benchmarks
def test_spellings_of_all_gold_answers():
    right, wrong = spellings.cases()
    assert len(spellings.golds()) == 1546 and len(right) > 25_000 and len(wrong) > 25_000
    # A part of them keeps the suite short.
    right, wrong = (random.Random(0).sample(part, 10_000) for part in (right, wrong))
    refused = [c for c in right if not is_correct(boxed(c[2]), c[1])]
    accepted = [c for c in wrong if is_correct(boxed(c[2]), c[1])]
    assert len(refused) <= 0.002 * len(right), refused[:20]
    assert len(accepted) <= 0.001 * len(wrong), accepted[:20]


@needs_benchmarks
def test_every_gold_answer_is_equal_to_itself_and_symmetric():
    rows, rng = [gold for _, gold in spellings.golds()], random.Random(0)
    for gold in rows:
        other = rng.choice(rows)
        assert is_correct(boxed(gold), gold)
        assert math_equal(gold, other) == math_equal(other, gold)


def test_hostile_input_is_refused_quickly():
    assert len(spellings.filled("7")) < answers.MAX_CHARS
    for name, text in spellings.HOSTILE.items():
        assert is_correct(boxed(text), "123") is False, name
    for name, slowest in spellings.hostile_seconds(is_correct).items():
        assert slowest < 0.1, name


def test_not_strings():
    for value in (None, 5, b"\\boxed{5}", ["5"]):
        assert extract_answer(value) is None and is_correct(value, "5") is False
    assert is_correct(boxed("5"), 5) and not is_correct(boxed("5"), None)


FRAGMENTS = r"""
\frac \sqrt \binom { } ( ) [ ] \{ \} | ^ _ ! , ; = < > + - * / \pm \cup \in \le \log \sin \left
\right \text{ \begin{pmatrix} \end{pmatrix} & \\ \lfloor \rfloor \lfloor(1,2)\rfloor \infty \pi
e i x n 0 1 2 10 3.5 1,234 % ° : \circ ' \approx and cm 1e5 $ \! \, ~ . ≈ √ ² \overline
\equiv \pmod{7} \text{m}=\text{n}
\boxed{ \cdot \dot{x} nan np.
""".split()


def test_fuzz():
    """Nothing raises, equality is symmetric, and what is extracted equals itself."""
    rng, extracted = random.Random(0), 0
    for i in range(3_000):
        if i % 3 == 0:
            texts = [rng.randbytes(rng.randrange(60)).decode("latin-1") for _ in range(2)]
        else:
            texts = ["".join(rng.choices(FRAGMENTS, k=rng.randrange(1, 16))) for _ in range(2)]
            if i % 3 == 1:  # a small edit, so that equality is not rare
                texts[1] = texts[0].replace(rng.choice(FRAGMENTS), rng.choice(FRAGMENTS), 1)
        a, b = texts
        assert math_equal(a, b) == math_equal(b, a), (a, b)
        assert math_equal(a, a)
        answer = extract_answer("so " + boxed(a))
        if answer:
            extracted += 1
            assert "boxed" in answer or is_correct(boxed(answer), answer), answer
        extract_answer(a + b)
        is_correct(boxed(a), b)
    assert extracted > 1_500
