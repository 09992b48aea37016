"""What the tests compare with: token statistics from whole logits, and each method's objective.

Everything is float64, one response at a time and without padding; nothing of the project is
imported. The tokens of a mini-batch are flat, (N,), response after response.
"""

import math

import torch


def drawn(seed: int = 0, width: int = 9):
    """Random (logp, old_logp, advantages, entropy, mask) with plenty of candidates and clips."""
    g = torch.Generator().manual_seed(seed)
    logp = -8 * torch.rand(6, width, generator=g)
    old_logp = logp + 0.4 * torch.randn(6, width, generator=g)
    advantages = torch.tensor([1.6, -0.5, 0.0, 0.9, -1.2, 2.5])
    entropy = 2 * torch.rand(6, width, generator=g)
    lengths = torch.randint(1, width + 1, (6, 1), generator=g)
    return logp, old_logp, advantages, entropy, torch.arange(width) < lengths


def by_loop(logp, old_logp, advantages, entropy, mask, tau_p, q, eps_low=0.2, eps_high=0.28):
    """STAPO's loss and gradient, token by token in Python floats (float64)."""
    tokens = [(i, t) for i in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[i, t]]
    p = {it: math.exp(float(logp[it])) for it in tokens}
    candidates = [it for it in tokens if float(advantages[it[0]]) > 0 and p[it] < tau_p]
    ordered = sorted(float(entropy[it]) for it in candidates)
    tau_h = -math.inf
    if ordered:
        place = q * (len(ordered) - 1)
        below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
        tau_h = below + (above - below) * (place - math.floor(place))
    kept = [it for it in tokens if not (it in candidates and float(entropy[it]) < tau_h)]
    total, gradient = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
    for i, t in kept:
        a, rho = float(advantages[i]), math.exp(float(logp[i, t]) - float(old_logp[i, t]))
        clipped = min(max(rho, 1 - eps_low), 1 + eps_high)
        total += min(rho * a, clipped * a)
        flat = (a > 0 and rho > 1 + eps_high) or (a < 0 and rho < 1 - eps_low)
        gradient[i, t] = 0.0 if flat else -rho * a / len(kept)
    return -total / max(1, len(kept)), gradient, len(candidates), len(tokens) - len(kept)


# ------------------------------------------------------------------------------ token statistics


def logit_stats(logits, targets):
    """(N, V), (N,) -> ln pi(y) and entropy in nats: (N,) float64."""
    logp = logits.double().log_softmax(-1)
    chosen = logp.gather(1, targets[:, None]).squeeze(1)
    return chosen, -(logp.exp() * logp).sum(-1)


def plain_head(hidden, weight, targets):
    """The same of hidden states (N, H) and the weight (V, H) of an output head."""
    return logit_stats(hidden.double() @ weight.double().T, targets)


def row_logits(model, response):
    """(T, V): the logits that predict each token of one response."""
    ids = torch.tensor([response.prompt_ids + response.ids])
    return model(ids).logits[0, len(response.prompt_ids) - 1 : -1]


def row_stats(model, response):
    """logp and entropy of each token of one response: (T,) each, with gradient."""
    return logit_stats(row_logits(model, response), torch.tensor(response.ids))


# ------------------------------------------------------------------- the objective of each method


def method_loss(
    model,
    responses,
    advantages,
    old_logp,
    *,
    method,
    noise=(),
    ref_logp=(),
    beta=0.04,
    tau_p=0.002,
    q=0.75,
    quantile_over="candidates",
):
    """-J of a method on a mini-batch, with its graph, and the sums behind the metrics.

    advantages: a float for each response; old_logp, noise, ref_logp: (T,) for each response.
    """
    lengths = [len(response.ids) for response in responses]
    stats = zip(*(row_stats(model, response) for response in responses))
    logp, entropy = map(torch.cat, stats)  # (N,) each
    a = torch.tensor(advantages, dtype=torch.float64)
    a = a.repeat_interleave(torch.tensor(lengths))  # A_i of each token
    rho = (logp - torch.cat(old_logp)).exp()
    low, high = (0.8, 1.2) if method == "grpo" else (0.8, 1.28)
    objective = torch.minimum(rho * a, rho.clamp(low, high) * a)
    rank_by = {"high-entropy": -entropy, "random": torch.cat(noise) if noise else None}
    rank_by = rank_by.get(method, entropy)  # STAPO's is the entropy
    has_candidates = method in ("stapo", "full-mask", "high-entropy", "random")
    candidates = silenced = (a > 0) & (logp.exp() < tau_p) & has_candidates  # (N,)
    thresholds = {}
    if method != "full-mask" and (candidates.any() or quantile_over == "all"):
        among = rank_by if quantile_over == "all" else rank_by[candidates]
        silenced = candidates & (rank_by < among.quantile(q))
        thresholds = {"tau_h": float(among.detach().quantile(q))} if method == "stapo" else {}
    if method == "20-entropy":  # few tokens carry a gradient, all of them are counted
        loss = -objective[entropy >= entropy.quantile(0.8)].sum() / len(a)
    elif method == "grpo":
        log_r = torch.cat(ref_logp) - logp
        objective = objective - beta * (log_r.exp() - log_r - 1)
        loss = -sum(tokens.mean() for tokens in objective.split(lengths)) / len(lengths)
    else:
        loss = -objective[~silenced].sum() / (~silenced).sum()
    # without a KL term, responses with A = 0 have no gradient and are left out of the passes
    forwarded = torch.ones_like(silenced) if method == "grpo" and beta else a != 0
    return loss, thresholds | {
        "candidates": int(candidates.sum()),
        "silenced": int(silenced.sum()),
        "clip_low": int(((a < 0) & (rho < low)).sum()),
        "clip_high": int(((a > 0) & (rho > high)).sum()),
        "tokens": int(forwarded.sum()),
        "ratio_sum": float(rho.detach()[forwarded].sum()),
        "kl_sum": float((rho - 1 - rho.log()).detach()[forwarded].sum()),
        "loss": float(loss.detach()),
    }
