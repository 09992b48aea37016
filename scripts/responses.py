"""responses.html: right responses token by token, one self-contained page. figures.py calls this.

Every token is tinted by its quadrant of (p, H); silenced ones are marked and in inverse video.
What is known of a token stands in its data-about attribute, which the style sheet shows in a panel
on hover, tap or keyboard focus. The script adds arrow keys and scrolling; the page can be read
without it. A page takes at most about 6 MB.
"""

import html
from pathlib import Path

SHOWN = 20  # responses of a page

# (p is low, H is low) -> the class of the token, its name in the legend, what it means
QUADRANTS = {
    (True, True): (
        "spurious",
        "low p, low H",
        "Unlikely where the model was sure of another word.",
    ),
    (True, False): ("exploring", "low p, high H", "Unlikely where the model was undecided."),
    (False, False): ("choosing", "high p, high H", "A common choice where it was undecided."),
    (False, True): ("sure", "high p, low H", "What the model was sure of: most tokens."),
}

STYLE = """
:root {
  --paper: #fdfcfa; --ink: #2b2a28; --soft: #6b6862; --line: #e6e2db; --card: #fff;
  --spurious: #fbdcc8; --exploring: #cbe5f7; --choosing: #f1eddb;
  --orange: #b03c06; --blue: #0b6aa8; --on-orange: #fff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #18191b; --ink: #dedbd5; --soft: #9c988f; --line: #35363a; --card: #222326;
    --spurious: #57290f; --exploring: #123f5c; --choosing: #343120;
    --orange: #ff9a62; --blue: #6dbdf0; --on-orange: #1b1005;
  }
}
*, ::before, ::after { box-sizing: border-box; }
html { color-scheme: light dark; scroll-padding: 5rem 0 20rem; -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2.5rem 1.25rem 20rem; max-width: 68rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.55 system-ui, sans-serif;
}
h1 { font-size: 1.5rem; font-weight: 650; margin: 0 0 .3rem; }
p, dd { margin: 0; }
.soft, dd { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .5rem 1rem; margin: 1.5rem 0; }
.hint { font-size: .875rem; margin: 0 0 1.5rem; }
article { border-top: 1px solid var(--line); padding: 1.4rem 0 1.6rem; }
h2 { font-size: 1rem; font-weight: 600; margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.facts { font-size: .875rem; }
.tokens, .sample, .tokens > ::after { font-family: ui-monospace, Menlo, Consolas, monospace; }
.tokens { margin-top: .8rem; line-height: 2; white-space: pre-wrap; overflow-wrap: anywhere; }
.tokens > *, .sample { border-radius: .2em; padding: .12em 0; cursor: default; }
/* A token that is written from right to left leaves its neighbours in their order. */
.tokens > * { unicode-bidi: isolate; }
.sample { padding: .12em .45em; font-size: .875rem; white-space: nowrap; }
.spurious { background: var(--spurious); border-bottom: 2px solid var(--orange); }
.exploring { background: var(--exploring); border-bottom: 2px dotted var(--blue); }
.choosing { background: var(--choosing); }
.tokens > del, del.sample {
  display: inline-block; background: var(--orange); color: var(--on-orange); font-weight: 700;
  border: 0; padding: 0 .3em; margin: 0 .15em; line-height: 1.4; white-space: break-spaces;
  text-decoration: none; print-color-adjust: exact;
}
del::before { content: "⊘"; font-weight: 400; margin-right: .25em; }
.tokens > :hover, .tokens > :focus { outline: 2px solid var(--ink); outline-offset: 1px; }
/* Whitespace keeps its character, under a faint sign. */
.tokens i { font-style: normal; position: relative; }
.tokens i::before {
  content: "␣"; position: absolute; left: 0; top: 0; line-height: normal; opacity: .35;
}
.tokens i.line::before { content: "↵"; position: static; }
.tokens i.tab::before { content: "⇥"; }
.tokens i.none::before { content: "∅"; position: static; }
.tokens del i::before { opacity: 1; }
code { font-size: .85em; opacity: .7; }
/* One place for what is known of the token under the pointer or in focus. */
.tokens > :hover::after, .tokens > :focus::after {
  content: attr(data-about); position: fixed; left: 0; right: 0; bottom: 0; z-index: 1;
  padding: .9rem 1.25rem 1rem; background: var(--card); color: var(--ink);
  border-top: 1px solid var(--line); box-shadow: 0 -.5rem 2rem #0002;
  font-size: .8125rem; font-weight: 400; line-height: 1.65; text-align: left; direction: ltr;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
.tokens > :hover::after { z-index: 2; }
@media (min-width: 60rem) {
  html { scroll-padding-bottom: 6rem; }
  body { padding-right: 24rem; padding-bottom: 6rem; }
  .hint, .tokens > :hover::after, .tokens > :focus::after {
    position: fixed; left: auto; right: max(1.25rem, 50vw - 32.75rem); top: 2.5rem; bottom: auto;
    width: 21rem; min-height: 17.5rem; padding: 1.1rem 1.4rem; background: var(--card);
    border: 1px solid var(--line); border-radius: .6rem; box-shadow: none;
  }
}
"""

INTRODUCTION = """<p class="soft">Tokens of responses with A &gt; 0, and what the policy that
sampled them says of them. p: the token's probability, low below {tau_p:g}. H: the entropy of the
model's next word, low below {split}. Responses with silenced tokens come first.</p>
"""

SCRIPT = """
addEventListener("keydown", (event) => {
  const token = document.activeElement, text = token.parentElement;
  if (!text || text.className !== "tokens") return;
  const steps = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" };
  const other = steps[event.key] && token[steps[event.key]];
  if (other) { other.focus(); event.preventDefault(); }
  if (event.key === "Escape") token.blur();
});
// On a narrow screen the panel is at the bottom: keep the token above it.
addEventListener("focusin", (event) => event.target.scrollIntoView({ block: "nearest" }));
"""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
<h1>{title}</h1>
{body}
<script>{script}</script>
</html>
"""


def visible(text: str, font: dict | None = None) -> str:
    """Whitespace as signs; what cannot be printed, or is no glyph of the font, as Python writes it.

    Controls, lone surrogates and marks that change the direction of writing cannot be printed.
    """
    signs = {" ": "␣", "\n": "↵", "\t": "⇥"}
    odd = {c for c in text if not c.isprintable() or (font and ord(c) not in font)}
    return "".join(signs.get(c) or (ascii(c)[1:-1] if c in odd else c) for c in text)


def markup(text: str) -> str:
    """Text for the page: it stays what it is, and the style sheet makes whitespace visible."""
    kinds = {" ": "<i> </i>", "\n": '<i class="line"></i>\n', "\t": '<i class="tab">\t</i>'}
    parts = []
    for character in text:
        if character in kinds:
            parts.append(kinds[character])
        elif character.isprintable():
            parts.append(html.escape(character))
        else:
            parts.append(f"<code>{visible(character)}</code>")
    return "".join(parts) or '<i class="none"></i>'


def number(value: float) -> str:
    """Three decimals, and two digits of what is below 0.01."""
    return f"{value:.3f}" if value >= 0.01 else f"{value:.2g}"


def about(response: dict, t: int, tau_p: float) -> str:
    """The lines of the panel for one token."""
    p, entropy, threshold = response["p"][t], response["entropy"][t], response["threshold"]
    fate = "silenced" if response["silenced"][t] else "kept"
    low_p = f"{'below' if p < tau_p else 'not below'} τ_p = {tau_p:g}"
    low_h = f"{'below' if entropy < threshold else 'not below'} {response['name']}"
    lines = [
        f"{visible(response['token'][t]) or '∅'} · {fate}",
        "",
        f"p  {number(p):<8} {low_p}",
        f"H  {number(entropy):<8} {low_h} = {threshold:.3g}",
        f"A  {response['advantage']:+.2f}",
        "",
        "The likeliest words here:",
        *(
            f"{number(share):<10} {visible(word) or '∅'}"
            for word, share in response["likeliest"][t]
        ),
    ]
    return "\n".join(lines)


def token(response: dict, t: int, tau_p: float) -> str:
    """One token; Tab stops at the low-probability ones, and arrow keys go on from there."""
    low_p, low_h = response["p"][t] < tau_p, response["entropy"][t] < response["threshold"]
    tag = "del" if response["silenced"][t] else "span"
    stop = 0 if low_p or response["silenced"][t] else -1
    text, known = markup(response["token"][t]), html.escape(about(response, t, tau_p))
    end = "\n" if text.endswith("\n") else ""  # outside, or the tint would reach into the next line
    return (
        f'<{tag} class="{QUADRANTS[low_p, low_h][0]}" tabindex="{stop}" '
        f'data-about="{known}">{text.removesuffix(end)}</{tag}>{end}'
    )


def article(response: dict, tau_p: float) -> str:
    """A response with its problem, what is known of it, and its tokens."""
    shown, length, start = len(response["token"]), response["length"], response["start"]
    facts = [
        f"step {response['step']}",
        f"answer {markup(response['answer'])}" if response["answer"] else "",
        f"A = {response['advantage']:+.2f}",
        f"{length:,} tokens",
        f"{sum(response['silenced'])} silenced",
        f"only tokens {start + 1:,} to {start + shown:,} are shown" if shown < length else "",
    ]
    tokens = "".join(token(response, t, tau_p) for t in range(shown))
    return (
        f"<article>\n<h2>{markup(response['problem'])}</h2>\n"
        f'<p class="facts soft">{" · ".join(filter(None, facts))}</p>\n'
        f'<div class="tokens">{tokens}</div>\n</article>'
    )


def legend(tau_p: float, split: str) -> str:
    """What the tints mean, in words."""
    meaning = "Left out of the loss: no gradient. STAPO silences low p with low H."
    rows = [f'<dt><del class="sample">silenced</del></dt><dd>{meaning}</dd>']
    for kind, name, meaning in QUADRANTS.values():
        rows.append(f'<dt><span class="sample {kind}">{name}</span></dt><dd>{meaning}</dd>')
    return INTRODUCTION.format(tau_p=tau_p, split=split) + "<dl>\n" + "\n".join(rows) + "\n</dl>"


def write_page(path: Path, name: str, dumps: list[dict]) -> None:
    """The responses of one group of runs: those with silenced tokens first, then the newest.

    A dump has "step", "tau_p" and "responses" as support/dumps.py makes them, and "split", which
    says below what H is low; each response has a "threshold", that number (nats), and its "name".
    """
    responses = [(r | {"step": d["step"]}, d["tau_p"]) for d in dumps for r in d["responses"]]
    responses.sort(key=lambda pair: (not any(pair[0]["silenced"]), -pair[0]["step"]))
    body = [
        legend(dumps[0]["tau_p"], " or ".join(sorted({dump["split"] for dump in dumps}))),
        '<aside class="hint soft">Point at a token or tap it. Tab goes to the next '
        "low-probability token, arrow keys to its neighbours.</aside>",
        *(article(*pair) for pair in responses[:SHOWN]),
    ]
    title = html.escape(f"{name}: right answers, token by token")
    page = PAGE.format(title=title, style=STYLE, script=SCRIPT, body="\n".join(body))
    path.write_text(page, "utf-8")
