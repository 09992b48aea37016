"""The benchmark's twins do the same work as the code they time; costs.py counts what there is."""

import copy
import functools
import importlib.util
import math
import re

import bench
import costs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rollout
import stapo
from support import decoding


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
    monkeypatch.setattr(stapo, "objective", lambda *args: (args[2].sum(), {}))
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
    assert next(bench.step(quick=True))[1] > 0


# ---------------------------------------- the counted step


class Count(TorchDispatchMode):
    """Kernels and bytes of what runs on the meta device, as CUDA would run it.

    A kernel reads its inputs and writes its outputs once; a lookup moves what it finds, a write
    into a part of a tensor that part. Views and empty tensors are free.
    """

    FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view")
    FOUND = ("aten::embedding", "aten::index.Tensor", "aten::gather", "aten::searchsorted.Tensor")
    kernels = bytes = 0

    def kernel(self, *moved: torch.Tensor) -> torch.Tensor:
        """Counts one; returns a tensor like the first that it moves."""
        self.kernels += 1
        for tensor in moved:  # an expanded dimension (stride 0) is there once
            sizes = [n for n, stride in zip(tensor.shape, tensor.stride()) if stride]
            self.bytes += tensor.element_size() * math.prod(sizes)
        return torch.empty_like(moved[0])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, outs = func.name(), tensors_in(out)
        if any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            return out  # a view
        if name.startswith(self.FOUND):
            self.kernel(*outs, *outs)
        elif name.startswith(("aten::index_put_", "aten::copy_")):
            new = args[2] if "index_put" in name else args[1]
            self.kernel(new, new)
        elif not name.startswith(self.FREE):
            self.kernel(*tensors_in((args, kwargs)), *outs)
        return out


def tensors_in(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.fixture
def count(monkeypatch):
    """count(call) -> Count; attention and RMSNorm are one kernel each, as on CUDA."""

    def counted(call) -> Count:
        count = Count()
        attention = lambda q, k, v, attn_mask=None, **_: count.kernel(q, q, k, v, attn_mask)  # noqa: E731
        norm = lambda x, _shape, weight, _eps: count.kernel(x, weight, x)  # noqa: E731
        with monkeypatch.context() as patch, count, torch.no_grad():
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
            patch.setattr(torch.nn.functional, "rms_norm", norm)
            call()
        return count

    return counted


def test_count_knows_what_a_kernel_moves(count):
    with torch.device("meta"):
        a, b = torch.empty(4, 8), torch.empty(8, 16)
        rows = torch.zeros(2, dtype=torch.long)
        norm = torch.nn.RMSNorm(8)

    def write():
        a[rows] = b[:2, :8]

    for call, words in (
        (lambda: (a @ b).view(2, 32), 4 * 8 + 8 * 16 + 4 * 16),
        (lambda: a[rows], 2 * (2 * 8)),
        (write, 2 * (2 * 8)),
        (lambda: a + b[:1, :8].expand(4, 8), 4 * 8 + 8 + 4 * 8),
        (lambda: norm(a), 4 * 8 + 8 + 4 * 8),
    ):
        found = count(call)
        assert (found.kernels, found.bytes) == (1, 4 * words)


@pytest.mark.parametrize("name, layers, size", [("1.7B", 28, 1_720_574_976), ("8B", 36, 0)])
def test_a_decoding_step_moves_little_beside_weights_and_cache(count, name, layers, size):
    """The page has the sentence; costs.py's number of kernels is the counted one."""
    model, rows, length = copy.deepcopy(costs.empty_model(name)).bfloat16(), 64, 2000
    forward = functools.partial(model, use_cache=True, logits_to_keep=1)
    draw = lambda _token, logits, numbers: decoding.next_token(logits, numbers)  # noqa: E731
    with torch.device("meta"), torch.no_grad():
        cache = decoding.SlotCache(length + 64, model.device, model.dtype)
        cache.reserve(rows, length + 64)
        forward.keywords["past_key_values"] = cache
        texts = [[7] * length] * rows
        step = lambda: decoding.decode(forward, cache, texts, [0] * rows, 1, draw)  # noqa: E731
        step()  # makes the cache
        found = count(step)
    assert found.kernels == costs.KERNELS[0] + costs.KERNELS[1] * layers
    if size:
        least = 2 * size + rows * length * layers * 2 * 8 * 128 * 2
        assert least < found.bytes <= 19.2e9, "transformers before 5.23 copies keys and values"
        sentence = f"moves {found.bytes / 1e9:.1f} GB ({least / 1e9:.1f} GB is the least) with "
        page = (costs.ROOT / "docs" / "reference.md").read_text()
        assert f"{sentence}{found.kernels} kernel launches" in page


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
    assert total_bytes(model.parameters()) == held["gathered"]
    assert held_cache == 3 * 17 * costs.cache_bytes(model.config)


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


def test_rollout_steps_are_those_that_a_rollout_takes(model):
    lengths, taken = costs.log_normal_lengths(32, 20, 56, 1.0), []
    prompts = torch.randint(3, 1024, (32, 16))
    prompts[:, -1] = torch.arange(32, 64)
    model.register_forward_hook(
        lambda _model, _args, kwargs, _out: taken.append(kwargs["input_ids"].shape),
        with_kwargs=True,
    )
    with bench.schedule(lengths, prompt_width=16):
        tokenizer, options = bench.word_tokenizer(1024), {"max_new_tokens": 56, "batch_size": 8}
        rollout.sample(model, tokenizer, prompts.tolist(), **options)

    steps = costs.rollout_steps(lengths, 8)
    decoded = [rows for rows, width in taken if width == 1]
    assert steps[:, 0].repeat_interleave(costs.CHECK_EVERY).tolist() == decoded
    assert steps[0].tolist() == [8, costs.PROMPT]
    # a look later the longest has eight tokens more, or has ended
    more = steps[:, 1].diff()
    assert ((more == 8) | (more <= 0)).all() and (more == 8).any() and (more < 0).any()


def test_costs_by_hand():
    """64 responses on two GPUs that hold all of them, and every row of the simulation is full."""
    cfg = stapo.Config(batch_size=8, mini_batch_size=2, group_size=8, max_new_tokens=4096)
    model, size = costs.empty_model("1.7B"), 1_720_574_976
    slow_host = costs.cost(cfg, model, 2, costs.Card(80, 1e15, 1e18), host=1e-3)
    assert slow_host["rows"] == 32 and slow_host["decoding_steps"] <= 4096
    assert slow_host["sampling"] == pytest.approx(0.830 * slow_host["decoding_steps"])
    statistics = 2 * size * (slow_host["tokens"] + 200) * 64 / (2 * 0.4 * 1e15)
    assert slow_host["statistics"] == pytest.approx(statistics)
    assert slow_host["update"] == pytest.approx((8 + 0.5 * 2 * 3 / 4) / 2 * statistics)
    # memory that needs more than the host's time for the weights alone
    slow_card = costs.cost(cfg, model, 2, costs.Card(80, 1e15, 2 * size / 0.1), host=1e-5)
    assert slow_card["sampling"] > 0.1 * slow_card["decoding_steps"]
    with pytest.raises(ValueError, match="does not fit on 1 x 24 GB"):
        costs.cost(cfg, model, 1, costs.CARDS["RTX 4090"], host=1e-5)


def test_a_decoding_step_by_hand():
    """The host; the card with weights, small kernels, and attention over one row and over 64."""
    model, card = costs.empty_model("1.7B"), costs.Card(80, 1e15, 2e12)
    steps = torch.tensor([[1, 16000], [64, 16000]])
    seconds = costs.step_seconds(model, card, host=1e-3, steps=steps)
    assert seconds.tolist() == pytest.approx([0.830, 0.830])
    fixed, cache = 830 * 2e-6 + 2 * 1_720_574_976 / 2e12, 64 * 16000 * 28 * 2 * 8 * 128 * 2 / 2e12
    seconds = costs.step_seconds(model, card, host=0.0, steps=steps)
    assert seconds.tolist() == pytest.approx([fixed + 28 * 0.58e-3, fixed + cache])


def test_recipes_say_what_is_counted():
    assert {path.name for path in (costs.ROOT / "recipes").iterdir()} == set(costs.RUNS)
    for run, machines in costs.RUNS.items():
        text = re.sub(r"\s+#?\s*", " ", (costs.ROOT / "recipes" / run).read_text())
        (cfg, model), (gpus, card) = costs.load_run(run), machines[1 if len(machines) == 4 else 0]
        peak = costs.bytes_per_gpu(model, gpus)["update"] / 1e9
        found = [
            costs.cost(cfg, model, gpus, costs.CARDS[card], host) for host in costs.HOST_SECONDS
        ]
        longest, rows = cfg.max_prompt_tokens + cfg.max_new_tokens, found[0]["rows"]
        assert f"up to {peak:.1f} GB" in text and f" {rows} rows of {longest:,} tokens" in text
        digits = 0 if found[0]["seconds"] > 600 else 1
        minutes = costs.span(*(each["seconds"] / 60 for each in found), digits)
        assert minutes in text, run


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none is here")
@pytest.mark.parametrize("name", bench.BENCHES)
def test_cuda_benchmark(name, monkeypatch):
    """Every pair at full size: `pytest -s -k cuda` prints each number as soon as it is there."""
    reasons, values = [], []
    monkeypatch.setattr(bench, "left_out", lambda what, why: reasons.append(f"{what}: {why}"))
    bench.distributed.start()
    try:
        for what, value in bench.BENCHES[name](quick=False):
            print(f"\n{what}: {value:.3g}", end="", flush=True)
            values.append(value)
    finally:
        bench.distributed.finish()
    print(*("", *reasons), sep="\n")
    if not values:
        pytest.skip("; ".join(reasons))
    assert all(map(math.isfinite, values))
