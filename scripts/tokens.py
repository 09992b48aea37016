"""Show a model's spurious tokens: how many there are and what they look like. Nothing is trained.

    python scripts/tokens.py RUN                            # a run of stapo.py, newest checkpoint
    python scripts/tokens.py RUN/checkpoints/step_000020    # an older checkpoint
    python scripts/tokens.py @recipes/qwen3-1.7b-one-80gb   # before any training

The model samples the responses of one step, to --batch_size prompts. S2T chooses among the tokens,
mini-batch by mini-batch, whatever the --method of a run. The script prints metrics with the
sampling check, a response, the share of silenced tokens, and the most frequent tokens of low p. It
writes quadrants.md, gradients.png and responses.html into --output.

RUN gives its flags. Flags on the command line replace the flags of RUN. All flags of stapo.py are
accepted. The default of --output is RUN/figures, or runs/tokens-<model>.
"""

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import responses
import torch
from figures import percent
from matplotlib.figure import Figure
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stapo
from rollout import Policy, Tokenizer, load_policy, to_text
from support import InputError, progress, ranks
from support.checkpoints import checkpoints
from support.files import folder_name, markdown
from support.flags import Parser, flags_of_model, flags_of_run
from support.metrics import sample_log
from support.models import gathered

SHOWN, WINDOW = 20, 1_000  # responses on the page, and tokens of each
BYTES = {sign: byte for byte, sign in bytes_to_unicode().items()}  # in a byte-level BPE's pieces


def parse(
    argv: list[str] | None,
    name: str = "tokens",
    about: str = __doc__,
    config: type = stapo.Config,
) -> stapo.Config:
    """Read the command line. Flags that it does not give come from RUN. Raises InputError.

    name, about, config: the name, the docstring and the flags of the script.
    """
    parser = Parser(config, description=about.split("\n")[0], fromfile_prefix_chars="@")
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run, or a checkpoint of a run")
    given, path = parser.given(argv), parser.parse_args(argv).run
    folder = "figures" if name == "tokens" else name
    held = {} if path else flags_of_model(given, f"{name}.py")
    if path:
        is_checkpoint = Path(path).parent.name == "checkpoints"
        run = Path(path).parent.parent if is_checkpoint else Path(path)
        held = flags_of_run(config, run) | {"output": ""}
        if "model" not in given:
            saved = [Path(path)] if is_checkpoint else checkpoints(run)
            if not saved:
                raise InputError(f"RUN {run}: has no checkpoint yet; wait for one, or give --model")
            # The checkpoint has its own template: the file may have changed since.
            held |= {"model": str(saved[-1]), "chat_template": "", "output": f"{run}/{folder}"}
    cfg = replace(config(**held | given), method="stapo", eval_every=0)
    stapo.check_flags(cfg)
    return replace(cfg, output=cfg.output or f"runs/{name}-{folder_name(cfg.model)}")


@torch.no_grad()
def next_words(model: torch.nn.Module, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the model expected in place of each of the last `count` tokens of a response.

    ids: (L,) long, prompt and response, count < L. Returns sum_v pi(v)^2 with shape (count,), and
    the five most likely words: their probabilities, largest first, and their ids, (count, 5) each.
    The temperature is 1, the vocabulary is full. The results are on the CPU, in float32.
    """
    parts = []
    hidden = model.base_model(ids[None].to(model.device), use_cache=False).last_hidden_state
    for states in hidden[0, -count - 1 : -1].split(256):  # (C, D): the states before the tokens
        pi = model.get_output_embeddings()(states).softmax(-1)  # (C, V) float32
        parts.append((torch.linalg.vecdot(pi, pi).cpu(), *(x.cpu() for x in pi.topk(5))))
    return tuple(torch.cat(tensors) for tensors in zip(*parts))


def silence(batch: stapo.Batch, cfg: stapo.Config) -> tuple[Tensor, Tensor]:
    """S2T by mini-batches: the silenced tokens, (B, L) bool, and tau_h for each row, (B,)."""
    parts = batch.mini_batches(cfg.batch_size // cfg.mini_batch_size)
    choices = [stapo.silence_spurious(part, None, cfg) for part in parts]  # None: p, H under pi_old
    silenced = batch.mask & ~torch.cat([choice.keep for choice in choices])
    return silenced, torch.cat([choice.tau_h.expand(len(choice.keep)) for choice in choices])


def positive_tokens(policy: Policy, batch: stapo.Batch, cfg: stapo.Config) -> dict[str, Tensor]:
    """Return all N tokens with A > 0, response after response, as (N,) and (N, 5) tensors.

    The gradient norm `norm` is that of Sec. 3.2, Lemma, at rho = 1. It needs no backward pass:
    ||dJ/da|| = |A| sqrt(1 - 2 p + sum_v pi(v)^2).

    H is low below tau_h of the mini-batch, or, without candidates, below the 0.8-quantile of H over
    all these tokens.
    """
    silenced, tau_h = silence(batch, cfg)
    right = batch.mask & (batch.advantages > 0)[:, None]  # (B, L)
    row = right.nonzero()[:, 0]  # (N,)
    words = []
    with gathered(policy) as model:
        for i in progress.track(row.unique().tolist(), "gradients"):
            ids = batch.ids[i, : batch.lengths[i]]
            words.append(next_words(model, ids, int(right[i].sum())))
    collision, likeliest_p, likeliest_id = (torch.cat(tensors) for tensors in zip(*words))
    A, tau_h = batch.advantages[row], tau_h[row]
    p, entropy = batch.old.logp[right].exp(), batch.old.entropy[right]
    threshold = tau_h.where(tau_h.isfinite(), stapo.quantile(entropy, 0.8))
    squared = 1 - 2 * p.double() + collision.double()
    return {
        "row": row,
        "id": batch.ids[right],
        "p": p,
        "entropy": entropy,
        "threshold": threshold,
        "low_p": p < cfg.tau_p,
        "low_h": entropy < threshold,
        "silenced": silenced[right],
        "norm": A.abs() * squared.clamp(min=0).sqrt(),  # rounding can go below 0
        "likeliest_p": likeliest_p,
        "likeliest_id": likeliest_id,
    }


@functools.cache
def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as text, with its blanks. A part of a character has bytes: \\xe6, <0xE6>."""
    # SentencePiece's decoder drops a blank at the beginning: take the second of two tokens.
    text = to_text(tokenizer, [token, token])[len(to_text(tokenizer, [token])) :]
    if "\ufffd" not in text:
        return text
    piece = tokenizer.convert_ids_to_tokens(token)
    if not set(piece) <= BYTES.keys():  # the sign itself
        return text
    return bytes(BYTES[sign] for sign in piece).decode("utf-8", "backslashreplace")


def rule(t: dict[str, Tensor], cfg: stapo.Config, tokenizer: Tokenizer) -> str:
    """Say in words which tokens are silenced, how sure the model was there, and what they are."""
    low, high = t["threshold"].min(), t["threshold"].max()
    text = f"A token is silenced if p < τ_p and H < τ_h. τ_p is {cfg.tau_p:g}. τ_h is "
    text += f"{low:.3g} to {high:.3g} nats: a quantile of H over the candidates of a mini-batch, "
    text += "or the 0.8-quantile of all H if there are none."
    if t["silenced"].any():
        sure = t["likeliest_p"][t["silenced"], 0].median()
        text += f" At the silenced tokens the likeliest word has p = {sure:.3g} (the median)."
    kept = t["low_p"] & ~t["silenced"]
    for name, tokens in (("silenced tokens", t["silenced"]), ("candidates that are kept", kept)):
        ids = t["id"][tokens].tolist()
        words = Counter(responses.visible(token_text(tokenizer, i), "␣") for i in ids)
        counts = [f"{word}\u00a0({count})" for word, count in words.most_common(20)]
        text += f"\n\nMost frequent {name} (with their counts):   {'   '.join(counts) or 'none'}"
    return text


def quadrants(t: dict[str, Tensor]) -> list[tuple[str, str, int, float]]:
    """Return the taxonomy of Sec. 3.2: p, H, the number of tokens, and their mean gradient norm."""
    found = []
    for p, h in (("low", "low"), ("low", "high"), ("high", "low"), ("high", "high")):
        here = (t["low_p"] == (p == "low")) & (t["low_h"] == (h == "low"))  # (N,)
        found.append((p, h, int(here.sum()), t["norm"][here].mean().item()))
    return found


def quadrant_table(t: dict[str, Tensor], all_tokens: int) -> str:
    """Return the quadrants as a Markdown table."""
    rows = [["tokens with A > 0", "count", "share", "of all tokens", "mean gradient norm"]]
    for p, h, count, norm in quadrants(t):
        name = f"{p} p, {h} H" + (" (silenced)" if p == h == "low" else "")
        shares = [percent(count / len(t["p"])), percent(count / all_tokens)]
        rows.append([name, str(count), *shares, f"{norm:.3f}" if count else "-"])
    return markdown(rows)


def draw_gradients(t: dict[str, Tensor], cfg: stapo.Config, file: Path) -> None:
    """Draw the gradient norm over p, and the quadrants of p and H; tokens of low p on top."""
    drawn = t["low_p"].long().argsort(stable=True)
    p, norm, silenced = t["p"][drawn].clamp(min=1e-12), t["norm"][drawn], t["silenced"][drawn]
    entropy, tau_p = t["entropy"][drawn], max(cfg.tau_p, 1e-12)
    panels = {
        "gradient norm |A| √(1 − 2p + Σπ²)": (norm, entropy, "entropy H (nats)"),
        "entropy H (nats)": (entropy, norm, "gradient norm"),
    }
    fig = Figure(figsize=(11, 4.5), layout="constrained")
    halo = {"color": "#D55E00", "s": 26, "linewidths": 0, "label": "silenced: p < τp, H < τh"}
    for place, (title, (height, shade, shade_title)) in enumerate(panels.items(), start=1):
        ax = fig.add_subplot(1, 2, place)
        ax.scatter(p[silenced], height[silenced], **halo)
        dots = ax.scatter(p, height, c=shade, s=9, linewidths=0, cmap="viridis")
        fig.colorbar(dots, ax=ax, label=shade_title)
        ax.axvline(tau_p, color="#D55E00", linestyle="--", label=f"τp = {cfg.tau_p:g}")
        ax.set(xscale="log", xlabel="token probability p", ylabel=title)
    band = t["threshold"].min(), t["threshold"].max()  # the last panel is that of the quadrants
    ax.axhspan(*band, color="#D55E00", alpha=0.3, label="between low and high H")
    for low_or_high, h, count, mean in quadrants(t):
        x, ha = (0.02, "left") if low_or_high == "low" else (0.98, "right")
        y, va = (0.02, "bottom") if h == "low" else (0.98, "top")
        text = f"{count:,} tokens" + (f"\nnorm {mean:.2f}" if count else "")
        ax.text(x, y, text, transform=ax.transAxes, ha=ha, va=va)
    ax.margins(y=0.25)
    fig.suptitle(f"{cfg.model}: tokens with A > 0").set_parse_math(False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    fig.savefig(file, dpi=150)


def describe(t: dict[str, Tensor], row: int, sample: dict, task: stapo.Task) -> dict:
    """Return a response for the page, with one list entry for each token that is shown.

    At most WINDOW tokens are shown: around the first silenced token, or from the beginning.
    """
    places = (t["row"] == row).nonzero().flatten()
    marked = t["silenced"][places].nonzero().flatten().tolist()
    start = max(0, min(marked[0] - WINDOW // 2, len(places) - WINDOW)) if marked else 0
    shown = {name: values[places[start : start + WINDOW]].tolist() for name, values in t.items()}
    words = zip(shown["likeliest_id"], shown["likeliest_p"])
    shown["token"] = [token_text(task.tokenizer, i) for i in shown["id"]]
    shown["likeliest"] = [[(token_text(task.tokenizer, i), p) for i, p in zip(*x)] for x in words]
    return shown | sample | {"start": start, "length": len(places), "marked": len(marked)}


def next_step(model: str) -> int:
    """Return the step whose prompts come next for a checkpoint, or 1 for another model."""
    trained = re.search(r"/checkpoints/step_(\d+)$", str(Path(model).absolute()))
    return int(trained[1]) + 1 if trained else 1


def run(cfg: stapo.Config) -> None:
    """Sample, print and draw. Raises InputError."""
    out = Path(cfg.output)
    out.mkdir(parents=True, exist_ok=True)  # before hours of sampling
    task, policy = stapo.load_task(cfg), load_policy(cfg.model)
    step = next_step(cfg.model)
    batch, texts = stapo.collect(policy, None, task, step, cfg)
    log, metrics = sample_log(batch, texts, task.problems), stapo.rollout_metrics(batch, cfg.tau_p)
    words = ", ".join(f"{name} {x:.4g}" for name, x in metrics.items() if x is not None)
    progress.say(f"the batch of step {step}: {words}")
    progress.check_sampler(metrics | {"step": step})
    progress.say(progress.response_in_words(log[0], step))
    if not (batch.advantages > 0).any():
        return progress.say("nothing to draw: no response has A > 0; try a larger --batch_size")
    t = positive_tokens(policy, batch, cfg)
    count, all_tokens = int(t["silenced"].sum()), int(batch.mask.sum())
    share = percent(count / all_tokens)
    each = t["low_p"].sum() * cfg.mini_batch_size / cfg.batch_size
    progress.say(f"STAPO silences {count:,} of {all_tokens:,} tokens, {share}")
    progress.say(f"candidates in a mini-batch: {each:.1f}")
    what = rule(t, cfg, task.tokenizer)
    table = f"### {cfg.model}\n\n{quadrant_table(t, all_tokens)}\n{what}\n"
    (out / "quadrants.md").write_text(table, "utf-8")
    draw_gradients(t, cfg, out / "gradients.png")
    marked = set(t["row"][t["silenced"]].tolist())
    # row % G is a response's number in its group, so the first responses are of many problems.
    rows = sorted(t["row"].unique().tolist(), key=lambda i: (i not in marked, i % cfg.group_size))
    described = [describe(t, row, log[row], task) for row in rows[:SHOWN]]
    what += "\n\nResponses with silenced tokens come first."
    page = responses.page(f"{cfg.model}: right answers, token by token", what, described, cfg.tau_p)
    (out / "responses.html").write_text(page, "utf-8")
    progress.say(f"\n{table}\nfigures in {out}")


def main(
    argv: list[str] | None = None,
    name: str = "tokens",
    about: str = __doc__,
    config: type = stapo.Config,
    work: Callable[[stapo.Config], None] = run,
) -> None:
    """Read the flags and do the work: `run`, or that of another script with the same flags."""
    with ranks.session(f"{name}.py"):
        if ranks.world_size() > 1:
            raise InputError("works in one process: start it without torchrun")
        progress.quiet_libraries()
        cfg = parse(argv, name, about, config)
        torch.set_num_threads(cfg.threads or torch.get_num_threads())
        progress.report_environment()
        work(cfg)


if __name__ == "__main__":
    main()
