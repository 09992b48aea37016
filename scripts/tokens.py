"""Show a model's spurious tokens: how many there are and what they look like. Nothing is trained.

    python scripts/tokens.py RUN                                          # a run of stapo.py
    python scripts/tokens.py @recipes/qwen3-1.7b-one-80gb                 # before any training
    python scripts/tokens.py --model M --data data.jsonl --batch_size 64  # on your own data

1. The model samples the responses of one step. With --batches, it samples those of several steps.
2. The method chooses among their tokens as in training, under the policy that sampled.
3. The script prints metrics with the sampling check, the share of silenced tokens, and the number
   of candidates in a mini-batch.
4. The script writes gradients.png, quadrants.md, tokens.png, tokens.json and responses.html.

RUN gives its flags and its newest checkpoint. Flags on the command line replace the flags of RUN.
All flags of stapo.py are accepted, because its arguments files have them. Flags that are only about
training change nothing here.
"""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib.pyplot as plt
import responses
import torch
from figures import METHODS, percent, save
from matplotlib.font_manager import findfont, get_font
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import eval as evaluation
import stapo
from rollout import Policy, to_text
from support import distributed, progress
from support.run_folder import checkpoints
from support.errors import InputError
from support.files import writing
from support.flags import Parser, flag, known_flags
from support.head import float32_logits
from support.models import check_head
from support.seeds import generator
from support.stop import Stopped, stop

SHOWN, WINDOW = 20, 1_000  # responses on the page, and tokens of each
MAX_DRAWN = 10_000  # points of gradients.png on each side of tau_p
PRINTED = (
    "accuracy zero_advantage_fraction response_length truncated_fraction entropy silenced_fraction "
    "sampling_gap sampling_z"
).split()  # metrics of each batch

# The files of the figures, in the order in which they are written.
WRITTEN = "quadrants.md", "gradients.png", "tokens.json", "tokens.png", "responses.html"

Tokens = dict[str, Tensor]  # all tokens of responses with A > 0, response after response: (N,) each


@dataclass(frozen=True)
class Config(stapo.Config):
    """The flags of training, and what to look at."""

    output: str = flag("", "folder of the figures; empty: RUN/figures or runs/tokens-<model>")
    checkpoint: str = flag("", "checkpoint of RUN, such as step_000020; empty: the newest")
    batches: int = flag(1, "number of steps whose responses are sampled")


def parse(argv: list[str] | None) -> Config:
    """Read the command line. Flags that it does not give come from RUN. Raises InputError."""
    parser = Parser(Config, __doc__.split("\n")[0])
    parser.add_argument("run", nargs="?", metavar="RUN", default="", help="directory of a run")
    run, given = parser.parse_args(argv).run, parser.given(argv)
    own_model = "model" in given or not run
    if own_model and "checkpoint" in given:
        raise InputError(f"--checkpoint {given['checkpoint']}: needs a RUN, and no --model")
    held = known_flags(Config, Path(run), "RUN") if run else {}
    if not own_model:
        held["model"] = find_checkpoint(Path(run), given.get("checkpoint", ""))
        held["chat_template"] = ""  # the checkpoint's own: the file may have changed since
    if given.get("method") in stapo.METHODS:  # RUN's flags may not go with another method
        for name in stapo.refused_flags(stapo.METHODS[given["method"]]):
            held.pop(name, None)
    cfg = Config(**held | given)
    if cfg.batches < 1:
        raise InputError(f"--batches {cfg.batches}: must be at least 1")
    folder = f"runs/tokens-{evaluation.file_name(cfg.model)}" if own_model else f"{run}/figures"
    output = given.get("output") or folder
    return replace(cfg, output=output, resume="", eval_every=0)  # no run, no evaluation


def find_checkpoint(run: Path, name: str) -> str:
    """Return the path of a run's checkpoint. An empty name is the newest. Raises InputError."""
    saved = {path.name: str(path) for path in checkpoints(run)}  # oldest first
    name = Path(name or next(reversed(saved), "")).name
    if name not in saved:
        names = ", ".join(saved) or "none yet"
        raise InputError(f"{run / 'checkpoints' / name}: no such checkpoint; there are: {names}")
    return saved[name]


# ------------------------------------------------------------------------- a batch and its tokens


@torch.no_grad()
def next_words(policy: Policy, ids: Tensor, count: int, k: int = 5) -> tuple[Tensor, ...]:
    """Return what the policy expected in place of each of the last `count` tokens of a response.

    ids: (L,) long, prompt and response, count < L. Returns sum_v pi(v)^2 with shape (count,), and
    the k most likely words: their probabilities, largest first, and their ids, (count, k) each. The
    temperature is 1, the vocabulary is full. The results are on the CPU, in float32.
    """
    model, parts = policy.model, []
    hidden = model.base_model(ids[None].to(model.device), use_cache=False).last_hidden_state
    for states in hidden[0, -count - 1 : -1].split(256):  # (C, D): the states before the tokens
        pi = float32_logits(states, model.get_output_embeddings().weight).softmax(-1)  # (C, V)
        parts.append((torch.linalg.vecdot(pi, pi).cpu(), *(x.cpu() for x in pi.topk(k))))
    return tuple(torch.cat(tensors) for tensors in zip(*parts))


def look(
    policy: Policy, task: stapo.Task, step: int, cfg: Config
) -> tuple[dict[str, float], Tokens, list[dict]]:
    """Sample the responses of a step and let the method choose among their tokens.

    Returns the metrics of training, the tokens with A > 0, and one row for each response as in
    samples.jsonl.
    """
    batch, samples = stapo.collect(policy, None, task, step, cfg)
    parts = batch.mini_batches(cfg.batch_size // cfg.mini_batch_size)
    choices = [stapo.METHODS[cfg.method].choose(part, part.old, cfg) for part in parts]
    line = stapo.entropy_metrics(batch) | stapo.rollout_metrics(batch, cfg.tau_p)
    counts = [stapo.count_tokens(part, part.old, choice) for part, choice in zip(parts, choices)]
    line |= {key: sum(count[key] for count in counts) for key in ("candidates", "silenced")}
    line["silenced_fraction"] = line["silenced"] / line["tokens"]
    tau_h = [math.nan if choice.tau_h is None else choice.tau_h for choice in choices]
    right = batch.mask & (batch.advantages > 0)[:, None]  # (B, L)
    tokens = {
        "row": torch.arange(len(right))[:, None],
        "id": batch.ids,
        "p": batch.old.logp.exp(),
        "entropy": batch.old.entropy,
        "advantage": batch.advantages[:, None],
        "kept": torch.cat([choice.keep for choice in choices]),
        "candidate": torch.cat([choice.candidates for choice in choices]),
        "tau_h": torch.tensor(tau_h).repeat_interleave(len(right) // len(parts))[:, None],
    }
    tokens = {name: values.expand(right.shape)[right] for name, values in tokens.items()}
    words = [(torch.empty(0), torch.empty(0, 5), torch.empty(0, 5, dtype=torch.long))]
    for row in progress.track(right.any(1).nonzero().flatten().tolist(), "gradients"):
        stop.leave_if_asked()
        ids = batch.ids[row, : batch.lengths[row]]
        words.append(next_words(policy, ids, int(right[row].sum())))
    names = ("collision", "likeliest_p", "likeliest_id")
    tokens |= {name: torch.cat(tensors) for name, tensors in zip(names, zip(*words))}
    return line, tokens, samples


def with_quadrants(t: Tokens, tau_p: float) -> Tokens:
    """Return the tokens with their gradient norms, their quadrants of (p, H) and what is silenced.

    The gradient norm is that of Sec. 3.2, Lemma, at rho = 1. It needs no backward pass:
    ||dJ/da|| = |A| sqrt(1 - 2 p + sum_v pi(v)^2).

    H is low below a threshold in nats: tau_h of the token's mini-batch, or, if that has none, the
    0.8-quantile of H over all the tokens.
    """
    squared = 1 - 2 * t["p"].double() + t["collision"].double()
    threshold = t["tau_h"].where(t["tau_h"].isfinite(), stapo.quantile(t["entropy"], 0.8))
    low_p = t["p"] < tau_p
    return t | {
        "norm": t["advantage"].abs() * squared.clamp(min=0).sqrt(),  # rounding can go below 0
        "threshold": threshold,
        "low_p": low_p,
        "low_h": t["entropy"] < threshold,
        # 20-Entropy has no candidates. It leaves out tokens of high p as well: they are not marked.
        "silenced": ~t["kept"] & (t["candidate"] | low_p),
    }


def describe(t: Tokens, row: int, sample: dict, text: Callable[[int], str]) -> dict:
    """Return a response for the page, with one list entry for each token that is shown.

    At most WINDOW tokens are shown: around the first silenced token, or from the beginning.
    """
    places = (t["row"] == row).nonzero().flatten()
    marked = t["silenced"][places].nonzero().flatten().tolist()
    start = max(0, min(marked[0] - WINDOW // 2, len(places) - WINDOW)) if marked else 0
    shown = {name: values[places[start : start + WINDOW]].tolist() for name, values in t.items()}
    words = zip(shown["likeliest_id"], shown["likeliest_p"])
    return shown | {
        "token": [text(i) for i in shown["id"]],
        "likeliest": [[(text(i), p) for i, p in zip(ids, shares)] for ids, shares in words],
        "problem": sample["problem"],
        "answer": sample["gold"],
        "advantage": sample["advantage"],
        "start": start,
        "length": len(places),
        "silenced_count": len(marked),
    }


# ---------------------------------------------------------------------------------------- figures


def quadrants(t: Tokens, all_tokens: int, label: str, tau_p: float) -> str:
    """Return the taxonomy of Sec. 3.2 as a Markdown table."""
    of_all = "share of all responses' tokens"
    rows = [["tokens with A > 0", "count", "share", of_all, "mean gradient norm", "silenced"]]
    for p, h in (("low", "low"), ("low", "high"), ("high", "low"), ("high", "high")):
        here = (t["low_p"] == (p == "low")) & (t["low_h"] == (h == "low"))  # (N,)
        count, bold = int(here.sum()), "**" if p == h == "low" else ""
        shares = [f"{bold}{percent(count / total)}{bold}" for total in (len(here), all_tokens)]
        norm, silenced = f"{t['norm'][here].mean():.3f}", int(t["silenced"][here].sum())
        rows.append([f"{p} p, {h} H", str(count), *shares, norm, str(silenced)])
    low, high = t["threshold"].min(), t["threshold"].max()
    text = f"### {label}\n\n{evaluation.markdown(rows)}"
    text += f"\nLow p: below {tau_p:g}. Low H: below τ_h of the mini-batch, or, if it has none, "
    return text + f"the 0.8-quantile of H. This is {low:.3g} to {high:.3g} nats.\n"


def thinned(low_p: Tensor) -> Tensor:
    """Return at most MAX_DRAWN tokens of high p, then as many of low p, which are drawn on top."""
    sides = [(low_p == low).nonzero().flatten() for low in (False, True)]
    return torch.cat([side[:: math.ceil(len(side) / MAX_DRAWN) or 1] for side in sides])


def draw_gradients(t: Tokens, label: str, tau_p: float, out: Path) -> None:
    """Draw the gradient norm over the probability, coloured by entropy."""
    drawn = thinned(t["low_p"])
    p, norm = t["p"][drawn].clamp(min=1e-12), t["norm"][drawn]
    spurious = (t["low_p"] & t["low_h"])[drawn]
    fig, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    halo = {"color": "#D55E00", "s": 26, "linewidths": 0, "label": "S2T's region: p < τp, H < τh"}
    ax.scatter(p[spurious], norm[spurious], **halo)
    dots = ax.scatter(p, norm, c=t["entropy"][drawn], s=9, linewidths=0, cmap="viridis")
    fig.colorbar(dots, ax=ax, label="entropy H (nats)")
    ax.axvline(max(tau_p, 1e-12), color="#D55E00", linestyle="--", label=f"τp = {tau_p:g}")
    ax.set(xscale="log", xlabel="token probability p", ylabel="gradient norm |A| √(1 − 2p + Σπ²)")
    ax.set_title(f"{label}: tokens with A > 0", parse_math=False)
    fig.legend(loc="outside lower left", ncols=2)
    save(fig, out / "gradients.png")


def draw_frequent(t: Tokens, label: str, text: Callable[[int], str], out: Path) -> None:
    """Draw the most frequent low-probability tokens of right answers, silenced and kept, as bars.

    tokens.json has the counts of all of them.
    """
    kinds = {"spurious": ("silenced", "#D55E00"), "exploratory": ("kept", "#0072B2")}
    counts = {kind: Counter() for kind in kinds}
    for i, silenced in zip(t["id"][t["low_p"]].tolist(), t["silenced"][t["low_p"]].tolist()):
        counts["spurious" if silenced else "exploratory"][text(i)] += 1
    ordered = {kind: dict(counter.most_common()) for kind, counter in counts.items()}
    (out / "tokens.json").write_text(json.dumps(ordered, indent=1))
    font = get_font(findfont("DejaVu Sans")).get_charmap()
    fig, axes = plt.subplots(1, 2, figsize=(9.6, 4.6), layout="constrained")
    for ax, (kind, (treated, colour)) in zip(axes, kinds.items()):
        top = counts[kind].most_common(20)[::-1]
        ax.barh(range(len(top)), [count for _, count in top], color=colour)
        names = [responses.visible(token, font) for token, _ in top]
        ax.set_yticks(range(len(top)), names, parse_math=False)
        ax.set(xlabel="tokens", title=f"low p, {treated} ({kind} under S2T)")
        ax.grid(axis="y", visible=False)
        ax.xaxis.get_major_locator().set_params(integer=True)
    fig.suptitle(label, parse_math=False)
    save(fig, out / "tokens.png")


def draw(t: Tokens, samples: list[dict], all_tokens: int, task: stapo.Task, cfg: Config) -> None:
    """Write all figures into cfg.output. Raises InputError if they cannot be written."""
    out, label = Path(cfg.output), f"{METHODS.get(cfg.method, [cfg.method])[0]} on {cfg.model}"
    t = with_quadrants(t, cfg.tau_p)

    def text(i: int) -> str:
        return to_text(task.tokenizer, [i])

    rows, marked = t["row"].unique(), set(t["row"][t["silenced"]].tolist())
    lots = torch.randperm(len(rows), generator=generator(cfg.seed, "responses"))
    shown = sorted(rows[lots].tolist(), key=lambda row: row not in marked)[:SHOWN]
    described = [describe(t, row, samples[row], text) for row in shown]
    table = quadrants(t, all_tokens, label, cfg.tau_p)
    with writing(out):
        (out / "quadrants.md").write_text(table, "utf-8")
        draw_gradients(t, label, cfg.tau_p, out)
        draw_frequent(t, label, text, out)
        page = responses.page(label, described, cfg.tau_p)
        (out / "responses.html").write_text(page, "utf-8")
    progress.say(f"\n{table}\nfigures in {out}")


# ------------------------------------------------------------------------------------ the command


def run(cfg: Config) -> None:
    """Sample, print and draw. Raises InputError, and Stopped if a stop was asked for."""
    out, task = Path(cfg.output), stapo.load_task(cfg)
    with writing(out):  # before hours of sampling
        out.mkdir(parents=True, exist_ok=True)
    held = [name for name in WRITTEN if (out / name).exists()]
    if held and WRITTEN[0] not in held:
        what = "was not written by this script; name another --output"
        raise InputError(f"{out / held[0]}: {what}")
    model, _ = evaluation.load(cfg.model)  # in bfloat16 on a GPU
    check_head(model)
    stop.listen()
    trained = re.search(r"/checkpoints/step_(\d+)$", str(Path(cfg.model).absolute()))
    first = int(trained[1]) + 1 if trained else 1  # the step whose prompts come next
    batches, samples, total = [], [], Counter()
    for step in range(first, first + cfg.batches):
        line, tokens, sampled = look(Policy(model), task, step, cfg)
        metrics = ", ".join(f"{name} {line[name]:.4g}" for name in PRINTED)
        progress.say(f"the batch of step {step}: {metrics}")
        progress.check_sampler(line | {"step": step})
        total.update({key: line[key] for key in ("tokens", "silenced", "candidates")})
        batches.append(tokens | {"row": tokens["row"] + len(samples)})
        samples += sampled
    each = total["candidates"] / (cfg.batches * cfg.batch_size // cfg.mini_batch_size)
    progress.say(
        f"{cfg.method} silences {total['silenced']:,} of {total['tokens']:,} tokens, "
        f"{percent(total['silenced'] / total['tokens'])}; candidates in a mini-batch: {each:.1f}"
    )
    tokens = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    if len(tokens["row"]):
        draw(tokens, samples, total["tokens"], task, cfg)
    else:
        progress.say("nothing to draw: no response has A > 0; try more --batches, or other data")


def main(argv: list[str] | None = None) -> None:
    with distributed.session("tokens.py"):
        if distributed.world_size() > 1:
            raise InputError("works in one process: start it without torchrun")
        progress.quiet_libraries()
        cfg = parse(argv)
        torch.set_num_threads(cfg.threads or torch.get_num_threads())
        progress.report_device(weights="bfloat16")
        try:
            run(cfg)
        except Stopped:
            progress.log("tokens.py: stopped; no figure was written")
            raise


if __name__ == "__main__":
    main()
