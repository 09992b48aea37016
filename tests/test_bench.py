"""The benchmark's twins do the same work as the code they time, and its sums are the tensors'."""

import importlib.util
import math
import re

import bench
import costs
import pytest
import torch

import rollout
import stapo


def total_bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.fixture(autouse=True)
def bench_on_the_cpu(monkeypatch, request):
    if "cuda" in request.node.name:
        return
    monkeypatch.setattr(bench, "CUDA", False)
    monkeypatch.setattr(bench, "DEVICE", torch.device("cpu"))


@pytest.fixture
def model():
    return bench.random_model(bench.small_shape(quick=True))


# ---------------------------------------- twins


def test_plain_head_is_the_twin_of_head_stats():
    inputs = bench.head_inputs(tokens=37, words=301, width=16)
    ours, plain = bench.run_head("ours", inputs), bench.run_head("plain", inputs)
    for a, b in zip(ours, plain, strict=True):
        assert bench.error(a, b) < 1e-5


def test_plain_update_is_the_twin_of_update(monkeypatch):
    compare, differences = bench.error, []
    monkeypatch.setattr(bench, "error", lambda *pair: differences.append(compare(*pair)) or 0.0)
    assert len(list(bench.update(quick=True))) == 2
    assert 0 < differences[-1] < 1e-5  # two computations: they round differently
    monkeypatch.setattr(bench, "error", compare)
    # With this loss responses with A = 0 have a gradient, too. The twin alone forwards them.
    monkeypatch.setattr(stapo, "batch_loss", lambda *args: (args[2].sum(), {}))
    with pytest.raises(RuntimeError, match="not have the same gradient"):
        next(bench.update(quick=True))


def test_both_rollouts_obey_the_schedule_and_sample_the_words(model):
    lengths = [3, 1, 40, 33, 7, 40]
    prompts = torch.randint(3, 1024, (6, 16))
    prompts[:, -1] = torch.arange(6, 12)  # the classes 0 to 5
    tokenizer = bench.word_tokenizer(1024)
    with bench.schedule(lengths, prompt_width=16):
        options = {"max_new_tokens": 40, "batch_size": 4}
        ours = [r.ids for r in rollout.sample(model, tokenizer, prompts.tolist(), **options)]
        plain = bench.plain_sample(model, prompts.tolist(), 40, 4)
        prompts[:, -1] = bench.SEPARATOR  # by place: all six at a time
        placed = bench.plain_sample(model, prompts.tolist(), 40, 6)
        assert model(torch.tensor([[5, 6]]), use_cache=False).logits.isfinite().all()  # no cache
    for rows in (ours, plain, placed):
        assert [len(ids) for ids in rows] == lengths
        assert all(ids[-1] == bench.EOS and bench.EOS not in ids[:-1] for ids in rows)
        for place, ids in enumerate(rows):
            assert {i % 6 for i in ids[:-1]} <= {place}
        assert len(set(rows[2])) > 20  # words are sampled, not repeated


@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="trl is not installed")
def test_step_does_the_same_work_as_trl():
    assert next(bench.step(quick=True))["value"] > 0


# ---------------------------------------- the counted step


def test_counted_step_holds_its_bars():
    """Nearly nothing is moved beside weights and cache, and the page has the sentence."""
    model, least = costs.empty_model("1.7B"), 2 * 1_720_574_976 + 64 * 2000 * 28 * 2 * 8 * 128 * 2
    assert costs.least_step_bytes(model, 64 * 2000) == least
    step = costs.counted_step(model)
    assert least < step.bytes <= 19.2e9, "transformers before 5.23 copies keys and values"
    assert step.launches <= 860
    assert costs.step_sentence(step) in (costs.ROOT / "docs" / "reference.md").read_text()


def test_count_knows_what_a_kernel_moves():
    with torch.device("meta"):
        a, b = torch.empty(4, 8), torch.empty(8, 16)
        rows = torch.zeros(2, dtype=torch.long)
    product = costs.counted(lambda: (a @ b).view(2, 32))
    assert (product.launches, product.bytes) == (1, 4 * (4 * 8 + 8 * 16 + 4 * 16))
    assert costs.counted(lambda: a[rows]).bytes == 4 * 2 * (2 * 8)

    def write():
        a[rows] = b[:2, :8]

    assert costs.counted(write).bytes == 4 * 2 * (2 * 8)
    shared = costs.counted(lambda: a + b[:1, :8].expand(4, 8))
    assert shared.bytes == 4 * (4 * 8 + 8 + 4 * 8)
    norm = torch.nn.RMSNorm(8, device="meta")
    fused = costs.counted(lambda: norm(a))
    assert (fused.launches, fused.bytes) == (1, 4 * (4 * 8 + 8 + 4 * 8))
    assert norm(torch.ones(1, 8, device="meta")).shape == (1, 8)  # torch's own again


# ---------------------------------------- memory


def test_models_have_the_published_numbers_of_parameters():
    for name, published in {
        "0.6B": 596_049_920,
        "1.7B": 1_720_574_976,
        "8B": 8_190_735_360,
        "14B": 14_768_307_200,
    }.items():
        assert costs.parameters(costs.empty_model(name)) == published


def test_states_and_cache_are_counted_to_the_byte(model):
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(2, 1024, (3, 17))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    held = costs.bytes_per_gpu(model, gpus=1)
    assert held["weights"] == total_bytes(model.parameters())
    assert held["gradients"] == total_bytes(p.grad for p in model.parameters())
    moments = [t for state in optimizer.state.values() for t in state.values()]
    assert held["adamw"] == total_bytes(moments)
    cache = model.bfloat16()(ids, use_cache=True).past_key_values
    held_cache = total_bytes(t for layer in cache.layers for t in (layer.keys, layer.values))
    weights = total_bytes(model.parameters())
    assert weights == held["gathered"]
    assert costs.least_step_bytes(model, 3 * 17) == weights + held_cache


def test_shards_are_counted_to_the_byte(model):
    """FSDP2 cuts along the first dimension and rank 0 holds the larger part."""
    for gpus in (3, 8, 64):
        shard = total_bytes(p.chunk(gpus)[0] for p in model.parameters())
        assert costs.bytes_per_gpu(model, gpus)["weights"] == shard


class SavesAsCUDA(torch.autograd.Function):
    """RMSNorm that keeps for its backward what CUDA's kernel keeps."""

    @staticmethod
    def forward(ctx, states, weight, eps):
        scale = (states.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(states, weight, scale)
        return (states.float() * scale * weight.float()).to(states.dtype)


def test_what_a_layer_saves_is_counted_to_the_byte(model, monkeypatch):
    """Autograd's saved tensors of one bfloat16 layer, each storage once, weights not counted."""
    norm = lambda states, _shape, weight, eps: SavesAsCUDA.apply(states, weight, eps)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "rms_norm", norm)
    model, tokens = model.bfloat16().train(), 64
    layer = model.model.layers[0]
    inputs = torch.randn(1, tokens, model.config.hidden_size).bfloat16().requires_grad_()
    positions = model.model.rotary_emb(inputs, torch.arange(tokens)[None])
    known = {t.untyped_storage().data_ptr() for t in (inputs, *model.parameters())}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(inputs, position_embeddings=positions)
    found = sum(s.nbytes() for pointer, s in saved.items() if pointer not in known)
    held = costs.bytes_per_gpu(model, 1, micro_tokens=tokens)
    assert found == held["layer"]
    assert held["inputs"] == model.config.num_hidden_layers * output.nbytes


# ---------------------------------------- costs


def test_lengths_are_log_normal():
    lengths = sorted(costs.log_normal_lengths(96, 79, 256))
    assert (lengths[47] + lengths[48]) / 2 == pytest.approx(79, abs=1) and lengths[-1] == 256
    assert lengths[15] == pytest.approx(79 / 1.65, rel=0.05)  # one sigma (0.5) below


def test_rollout_time_counts_the_steps_that_a_rollout_takes(model):
    lengths, calls, taken = costs.log_normal_lengths(32, 20, 56, 1.0), [], []
    prompts = torch.randint(3, 1024, (32, 16))
    prompts[:, -1] = torch.arange(32, 64)
    model.register_forward_hook(
        lambda _model, _args, kwargs, _out: taken.append(kwargs["input_ids"].shape),
        with_kwargs=True,
    )
    with bench.schedule(lengths, prompt_width=16):
        tokenizer, options = bench.word_tokenizer(1024), {"max_new_tokens": 56, "batch_size": 8}
        rollout.sample(model, tokenizer, prompts.tolist(), **options)

    def step_seconds(rows, longest):
        calls.append((rows, longest))
        return torch.full((len(longest),), 0.5)

    seconds, steps = costs.rollout_time(lengths, 8, step_seconds)
    decoded = [rows for rows, width in taken if width == 1]
    assert steps == len(decoded) and seconds == 0.5 * steps
    assert [rows for rows, longest in calls for _ in range(8 * len(longest))] == decoded
    assert calls[0][0] == 8 and calls[0][1][0] == costs.PROMPT
    assert all(longest.diff().eq(8).all() for _, longest in calls)


def test_costs_by_hand():
    """64 responses on two GPUs that hold all of them, and every row of the simulation is full."""
    cfg = stapo.Config(batch_size=8, mini_batch_size=2, group_size=8, max_new_tokens=4096)
    model, size = costs.empty_model("1.7B"), 1_720_574_976
    slow_host = costs.cost(cfg, model, 2, costs.Card(80, 1e15, 1e18), host=1e-3)
    assert slow_host.rows == 32 and slow_host.decoding_steps <= 4096
    assert slow_host.sampling == pytest.approx(0.830 * slow_host.decoding_steps)
    statistics = 2 * size * (slow_host.tokens + 200) * 64 / (2 * 0.4 * 1e15)
    assert slow_host.statistics == pytest.approx(statistics)
    assert slow_host.update == pytest.approx((8 + 0.5 * 2 * 3 / 4) / 2 * statistics)
    # memory that needs more than the host's time for the weights alone
    slow_card = costs.cost(cfg, model, 2, costs.Card(80, 1e15, 2 * size / 0.1), host=1e-5)
    assert slow_card.sampling > 0.1 * slow_card.decoding_steps
    with pytest.raises(ValueError, match="does not fit on 1 x 24 GB"):
        costs.cost(cfg, model, 1, costs.CARDS["RTX 4090"], host=1e-5)


def test_a_decoding_step_by_hand():
    """The host; the card with weights, small kernels, and attention over one row and over 64."""
    model, card = costs.empty_model("1.7B"), costs.Card(80, 1e15, 2e12)
    tokens = torch.tensor([16000])
    assert costs.step_seconds(model, card, host=1e-3)(64, tokens).item() == pytest.approx(0.830)
    on_card, fixed = (
        costs.step_seconds(model, card, host=0.0),
        830 * 2e-6 + 2 * 1_720_574_976 / 2e12,
    )
    assert on_card(1, tokens).item() == pytest.approx(fixed + 28 * 0.58e-3)
    assert on_card(64, tokens).item() == pytest.approx(
        fixed + 64 * 16000 * 28 * 2 * 8 * 128 * 2 / 2e12
    )


def test_recipes_say_what_is_counted():
    for run, machines in costs.RUNS.items():
        text = re.sub(r"\s+#?\s*", " ", (costs.ROOT / "recipes" / run).read_text())
        (cfg, model), (gpus, card) = costs.load_run(run), machines[1 if run == costs.PAPER else 0]
        peak = costs.bytes_per_gpu(model, gpus)["update"] / 1e9
        low, high = (
            costs.cost(cfg, model, gpus, costs.CARDS[card], host) for host in costs.HOST_SECONDS
        )
        longest = cfg.max_prompt_tokens + cfg.max_new_tokens
        assert f"up to {peak:.1f} GB" in text and f" {low.rows} rows of {longest:,} tokens" in text
        digits = 0 if low.seconds > 600 else 1
        assert costs.span(low.seconds / 60, high.seconds / 60, digits) in text, run


def test_tables_have_every_row_and_every_recipe_fits_on_its_cards():
    for table, rows in (
        (costs.memory_table(), len(costs.MACHINES)),
        (costs.costs_table(), sum(map(len, costs.RUNS.values()))),
    ):
        lines = table.splitlines()
        assert len(lines) == 2 + rows and len({line.count("|") for line in lines}) == 1
    assert {path.name for path in (costs.ROOT / "recipes").iterdir()} == set(costs.RUNS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none is here")
@pytest.mark.parametrize("name", bench.BENCHES)
def test_cuda_benchmark(name, monkeypatch):
    """Every pair at full size: `pytest -s -k cuda` prints each number as soon as it is there."""
    reasons, values = [], []
    monkeypatch.setattr(bench, "left_out", lambda what, why: reasons.append(f"{what}: {why}"))
    bench.distributed.start()
    try:
        for line in bench.BENCHES[name](quick=False):
            print(f"\n{bench.table_line(line, bars=False)}", end="", flush=True)
            values.append(line["value"])
    finally:
        bench.distributed.finish()
    print(*("", *reasons), sep="\n")
    if not values:
        pytest.skip("; ".join(reasons))
    assert all(map(math.isfinite, values))
