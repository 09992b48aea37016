"""responses.html: any text stays text, tints and marks are right, nothing comes from elsewhere."""

import random
import re

from helpers import Page
from responses import page

HOSTILE = ["<b>", "</script><script>x()</script>", '"', '" onfocus="x()', "'", "&amp;", "<!--"]
HOSTILE += ["</div></article>", "\\frac{1}{2}", "$x^2$", "{style}", "%s", " 所以", "�", "مرحبا"]
HOSTILE += ["\u202e", "\u200b", "\ud800", "\x00", "\r\n", "\n\n", ".\n", "\n x", "\t", "    ", ""]


def make_response(words: list[str], seed: int = 0, **more) -> dict:
    """Every quadrant has tokens; half of those that STAPO would silence are marked."""
    draw = random.Random(seed)
    p = [10 ** draw.uniform(-6, 0) for _ in words]
    entropy = [draw.uniform(0, 1) for _ in words]
    fields = {"problem": "?", "answer": "7", "advantage": 1.62, "start": 0, "length": len(words)}
    fields |= {"token": words, "p": p, "entropy": entropy, "threshold": [0.4] * len(words)}
    fields["silenced"] = [a < 0.002 and h < 0.2 for a, h in zip(p, entropy)]
    fields["likeliest"] = [[[draw.choice(words), 0.5 / k] for k in range(1, 6)] for _ in words]
    fields["silenced_count"] = sum(fields["silenced"])
    return fields | more


def page_of(*shown: dict) -> tuple[Page, str]:
    text = page("STAPO on <b>", [*shown], 0.002)
    text.encode("utf-8")  # what is not a character of its own is spelt out
    return Page(text), text


def test_hostile_text_stays_text_and_nothing_comes_from_elsewhere():
    response = make_response(HOSTILE, problem="".join(HOSTILE), answer="</h2><script>")
    found, text = page_of(response)
    shown = [*HOSTILE]
    for character in ("\u202e", "\u200b", "\ud800", "\x00", "\r"):
        shown = [word.replace(character, ascii(character)[1:-1]) for word in shown]
    assert [token["text"] for token in found.responses[0]] == shown
    for t, token in enumerate(found.responses[0]):
        lines = token["data-about"].split("\n")
        words = [line.split(maxsplit=1)[1] for line in lines[-5:]]
        for sign, character in ("␣ ", "↵\n", "⇥\t"):
            words = [word.replace(sign, character) for word in words]
        expected = [shown[HOSTILE.index(word)] or "∅" for word, _ in response["likeliest"][t]]
        assert words == expected
    own = {"html", "meta", "title", "style", "h1", "h2", "p", "dl", "dt", "dd", "aside"}
    assert set(found.tags) == own | {"article", "div", "span", "del", "i", "code"}
    own = {"lang", "charset", "class", "tabindex", "data-about"}
    assert set(found.attributes) == own
    assert not re.search(r"https?:|url\(|@import|//[a-z]", text)


def test_tints_marks_and_tab_stops_equal_a_loop():
    response = make_response([str(i) for i in range(300)])
    found, _ = page_of(response)
    names = {"spurious", "exploring", "choosing", "sure"}
    assert {token["class"] for token in found.responses[0]} == names
    assert 5 < sum(response["silenced"]) < 250
    for t, token in enumerate(found.responses[0]):
        low_p, low_h = response["p"][t] < 0.002, response["entropy"][t] < 0.4
        if low_p:
            assert token["class"] == ("spurious" if low_h else "exploring")
        else:
            assert token["class"] == ("sure" if low_h else "choosing")
        assert token["tag"] == ("del" if response["silenced"][t] else "span")
        assert token["tabindex"] == ("0" if low_p else "-1")
        about = token["data-about"].split("\n")
        assert about[0] == f"{t} · {'silenced' if response['silenced'][t] else 'kept'}"
        p, entropy = (line.split(maxsplit=2) for line in about[2:4])
        assert abs(float(p[1]) / response["p"][t] - 1) < 0.05
        assert abs(float(entropy[1]) - response["entropy"][t]) < 0.001
        assert p[2] == ("below" if low_p else "not below") + " 0.002"
        assert entropy[2] == ("below" if low_h else "not below") + " 0.4"
        assert about[4] == "A  +1.62"
        assert about[-5:] == [f"{s:<10.3g} {word}" for word, s in response["likeliest"][t]]


def test_a_cut_is_told():
    cut = make_response(["b"] * 3, silenced=[0, 1, 0], start=3_000, length=12_345, silenced_count=4)
    _, text = page_of(make_response(["a"], silenced=[False]), cut)
    told = "12,345 tokens · 4 silenced · only tokens 3,001 to 3,003 are shown"
    assert text.count(told) == text.count("are shown") == 1
    assert text.count('<p class="facts soft">answer 7 · A = +1.62 · ') == 2
