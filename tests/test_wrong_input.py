"""Wrong flags, files, rows, models and directories: one clear line, and nothing is written over."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
import transformers
from datasets import Dataset
from helpers import FLAGS, ROOT, SHAPE, TINY, refused, run, write_rows

import eval as evaluation
import rollout
from rollout import load_policy
from support import InputError, models
from support.data import load_problems

TRAINING = r"""
--method ppo | --method ppo: not one of stapo, justrl
--group_size 1 | --group_size 1: an advantage needs
--q 1.5 | --q 1.5: a quantile is between 0 and 1
--grad_clip -1 | --grad_clip -1.0: must be above 0
--batch_size 5 | --batch_size 5: not a multiple of --mini_batch_size 2
--max_prompt_tokens 1 | --max_prompt_tokens 1: every prompt is longer
--model no/such/model | no/such/model: no tokenizer there
--model {}/shell --max_new_tokens 4090 | --max_new_tokens 4090: the longest .* at most
--eval_every 1 --eval_benchmarks {}/long.jsonl | --max_new_tokens 40: the longest
--data nowhere.jsonl | nowhere.jsonl: cannot be read as a dataset .*No such file
--data {}/torn.jsonl | torn.jsonl: cannot be read as a dataset .line 1 is not JSON
--reward nowhere.py:f | --reward nowhere.py:f: nowhere.py is no Python file
--reward {}/own.py:f | --reward {}/own.py:f: .* has no function f
--reward own | own is no Python file .FILE.py:FUNCTION
--data {}/table.csv | table.csv: cannot be read as a dataset ..csv is no kind of file
--data {}/table.jsonl.gz | table.jsonl.gz: cannot be read as a dataset ..gz is no kind of file
--data {}/index.json | index.json: row 1 has no problem .* columns 0, 1; .*orient="records"
--data {}/hub | hub: .* pick one among .*'main', 'other'.*; .* ID:CONFIG or ID:CONFIG:SPLIT
--data {}/hub:main:nowhere | hub:main:nowhere: .*Should be one of .'train', 'test'.
--chat_template {} | --chat_template {}: no text there
--chat_template {}/torn.jinja | torn.jinja: no chat template .line 2: unexpected
--chat_template {}/forgetful.jinja | forgetful.jinja: the chat template leaves out the problem
--chat_template {}/pasted.jinja | pasted.jinja: the chat template writes .n as two characters, as in
--chat_template {}/good.json | good.json: its JSON has no chat_template
--data {}/binary.parquet | binary.parquet: row 1 has no .* .problem is bytes, answer is str.$
--model {}/flash | flash: no model there, .*the package for FlashAttention2
--resume {}/uploaded | uploaded: step_000001 has no whole trainer/; .* --model {}/uploaded/check
--resume {}/mistyped | mistyped: holds no run
--resume {}/model | model: holds no run
--resume {}/early | early: holds no checkpoint; start anew in another --output
--resume {}/run --output {}/new | --output: a resumed run stays in its directory
--output {}/run | --output {}/run: holds checkpoints; continue a run with --resume
@{}/nowhere | No such file
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the flags name: files, a model, one without weights, a run."""
    folder = tmp_path_factory.mktemp("input")
    (folder / "torn.jsonl").write_text('{"problem": "1+1", "ans')
    (folder / "own.py").write_text("f = 1")
    write_rows(folder / "long.jsonl", {"problem": "1+" * 5000, "answer": "2"})
    write_rows(folder / "good.jsonl", {"problem": "1+1", "answer": "2"})
    (folder / "table.csv").write_text("problem,answer\n1+1,2\n")
    (folder / "table.jsonl.gz").write_bytes(b"\x1f\x8b")
    (folder / "index.json").write_text('{"0": {"problem": "1+1"}, "1": {"problem": "1+2"}}')
    (folder / "torn.jinja").write_text("{{ messages[0].content }}\n{% if")
    (folder / "forgetful.jinja").write_text("{{ problem }} Answer:")
    (folder / "pasted.jinja").write_text(r"user\n{{ messages[0].content }}\nassistant: ")
    (folder / "good.json").write_text('{"model_max_length": 9}')
    Dataset.from_dict({"problem": [b"1+1"], "answer": ["2"]}).to_parquet(folder / "binary.parquet")
    write_hub(folder / "hub")
    shutil.copytree(TINY, folder / "model")
    shutil.copytree(TINY, folder / "shell", ignore=lambda *_: ["model.safetensors"])
    run(folder / "run", "--steps 1")
    shutil.copytree(folder / "run", folder / "early", ignore=lambda *_: ["checkpoints"])
    shutil.copytree(folder / "run", folder / "uploaded", ignore=lambda *_: [".metadata"])
    config = json.loads((TINY / "config.json").read_text())
    shutil.copytree(TINY, folder / "flash")
    config["attn_implementation"] = "flash_attention_2"
    (folder / "flash" / "config.json").write_text(json.dumps(config))
    return folder


def write_hub(folder):
    """A data set as the Hub has them, with two configurations; `main` has two splits."""
    folder.mkdir()
    for name in ("train", "test"):
        write_rows(folder / f"{name}.jsonl", {"question": f"{name}?", "answer": "So\n#### 2"})
    splits = [f"  - split: {name}\n    path: {name}.jsonl\n" for name in ("train", "test")]
    text = f"- config_name: main\n  data_files:\n{''.join(splits)}- config_name: other\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{text}  data_files: train.jsonl\n---\n")


def contents(folder) -> dict:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def too_small(flags: str, least: int) -> list[str]:
    """A row for each flag: one below its least value."""
    below = [f"--{flag} {least - 1}" for flag in flags.split()]
    return [f"{flag} | {flag}: must be at least {least}" for flag in below]


ROWS = TRAINING.strip().splitlines()
ROWS += too_small("keep_last rollout_batch_size tokens_per_micro_batch batch_size", least=1)
ROWS += too_small("mini_batch_size max_new_tokens max_prompt_tokens", least=1)
ROWS += too_small("steps save_every warmup_steps threads log_samples", least=0)
ROWS += too_small("eval_every eval_limit eval_samples", least=0)


@pytest.mark.parametrize("row", ROWS)
def test_stapo_py(folder, tmp_path, capsys, row):
    flags, message = row.replace("{}", str(folder)).split(" | ")
    before = contents(folder)
    given = flags if "--resume" in flags else f"{FLAGS} --output {tmp_path}/run {flags}"
    line = refused(capsys, given).strip().splitlines()[-1]
    assert re.search(message, line), line
    assert contents(folder) == before


EVALUATION = r"""
--benchmarks aime26 | benchmark aime26: neither a file nor one of aime24,
--benchmarks {}/good.jsonl {}/good.jsonl | there is a good before it
--decoding hot | --decoding hot: must be training, justrl or temperature,top-p
--decoding 0.6,95 | --decoding 0.6,95: must be
--decoding 0.6,0 | --decoding 0.6,0: must be
--model {}/nobody | nobody: no model there
--model {}/run | run: a run; its newest checkpoint is {}/run/checkpoints/step_000001$
--output {}/model | --output {}/model: holds args; name an empty directory
--max_new_tokens 4090 | --max_new_tokens 4090: .* 4096 positions, so at most
"""


EVAL_ROWS = EVALUATION.strip().splitlines() + too_small("samples limit", least=0)
EVAL_ROWS += too_small("max_new_tokens rollout_batch_size", least=1)


@pytest.mark.parametrize("row", EVAL_ROWS)
def test_eval_py(folder, tmp_path, capsys, monkeypatch, row):
    monkeypatch.setattr(evaluation.rollout, "sample", None)  # it is found before sampling
    flags, message = row.replace("{}", str(folder)).split(" | ")
    before = contents(folder)
    own = f"--model {TINY} --max_new_tokens 500 --output {tmp_path}/out"
    own += f" --benchmarks {folder}/good.jsonl {flags}"
    line = refused(capsys, own, evaluation.main)
    assert re.search(message, line), line
    assert line.startswith("eval.py: ") and "\n" not in line
    assert contents(folder) == before


def test_hidden_files_are_nobodys_work(tmp_path):
    (tmp_path / ".DS_Store").touch()
    run(tmp_path, "--steps 1")


# ------------------------------------------------------------------------------------------- rows


USER = {"role": "user", "content": "1+1"}


@pytest.mark.parametrize(
    "column, value",
    [("answer", value) for value in (math.nan, True, ["2", None], [["2"]], {"a": "2"})]
    + [("problem", value) for value in (math.nan, [["1+1"]])]
    + [("problem", [{"role": "system", "content": "Speak."}, USER])]
    + [("problem", [USER | {"content": [{"type": "text", "text": "1+1"}]}])],
)
def test_an_odd_row_is_refused_with_its_number(tmp_path, column, value):
    """The second of its file. What a reward of one's own reads of an answer is its own affair."""
    odd = {"problem": "1+1", "answer": "2", "question": None, "final_answer": None}
    odd[column] = value
    sound = {**dict.fromkeys(odd), "question": "1+0", "final_answer": "1"}
    file = str(tmp_path / "rows.parquet")
    Dataset.from_list([sound, odd]).to_parquet(file)
    with pytest.raises(InputError, match="rows.parquet: row 2 has no problem or no answer"):
        load_problems(file)
    if column == "answer":
        own = load_problems(file, whole_rows=True)[1]
        assert own["answer"] == "" and (own["row"]["answer"] == value or math.isnan(value))


@pytest.mark.parametrize(
    "rest, message",
    [
        ('"question": "Which?", "choices": ["a", "b"], "answer": 2}', "has choices outside its"),
        (
            '"question": "Is a so?", "options": {"A": "a", "B": "b"}, "answer": "B"}',
            "has options outside",
        ),
        ('"problem": "1", "answer": "\\ud800"}', "has half of a character"),
        ('"problem": "1\\udfff", "answer": "1"}', "has half of a character"),
        (r'"problem": "1", "answer": "\frac{1}{2}"}', r"character '.x0c' in its answer; in JSON"),
        (r'"problem": "1", "answer": "2 \times x"}', r"character '.t' in its answer; in JSON"),
        (r'"problem": "1", "answer": "\rho"}', r"character '.r' in its answer; in JSON"),
        (r'"problem": "1", "reward_model": {"ground_truth": "[\"7\", \"8\"]"}}', "no answer"),
    ],
)
def test_a_row_that_would_be_another_question_is_refused(tmp_path, rest, message):
    good = (
        '{"problem": "1 or 2?", "options": [1, " 2 ", null], "context": "", "answer": "a\\r\\nb"}\n'
    )
    (tmp_path / "rows.jsonl").write_text(good + "{" + rest + "\n")
    with pytest.raises(InputError, match=f"rows.jsonl: row 2 .*{message}"):
        load_problems(str(tmp_path / "rows.jsonl"))


def test_a_data_set_of_the_hub_with_its_configuration_and_split(tmp_path):
    write_hub(tmp_path / "hub")
    for name, problem in (("hub:main", "train?"), ("hub:main:test", "test?"), ("hub:other", "tr")):
        (found,) = load_problems(f"{tmp_path}/{name}")
        assert found["problem"].startswith(problem) and found["answer"] == "2"


def test_a_gated_model_says_where_to_log_in(monkeypatch, capsys, tmp_path):
    def gated(name, **_):
        lines = "You are trying to access a gated repo.", "Ask at https://huggingface.co/a/b.", ""
        raise OSError("\n".join([*lines, "401 Client Error.", "Please log in."]))

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", gated)
    line = refused(capsys, f"{FLAGS} --model a/b --output {tmp_path}/run")
    assert "Ask at https://huggingface.co/a/b. 401 Client Error. Please log in." in line
    assert "\n" not in line


def test_a_package_that_is_too_old_is_named(tmp_path):
    """The message comes before any import of a name that this stub of transformers lacks."""
    names = "AutoTokenizer = GenerationConfig = PreTrainedModel = PreTrainedTokenizerBase"
    (tmp_path / "transformers.py").write_text(f"{names} = object\n")
    (tmp_path / "transformers-4.57.1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.1\n"
    (tmp_path / "transformers-4.57.1.dist-info/METADATA").write_text(metadata)
    command = [sys.executable, ROOT / "stapo.py", "--help"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = "transformers 4.57.1 is too old: pip install -r requirements.txt"
    assert ended.returncode == 1 and ended.stderr.strip() == said


# ----------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_other_rows(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    rope |= {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=rope)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"{tmp_path}.* rope_type {kind}"):
        models.load_model(str(tmp_path))


def test_responses_fit_in_the_positions():
    config = transformers.LlamaConfig(max_position_embeddings=64)
    models.check_length(config, 24, 40)
    models.check_length(transformers.MambaConfig(), 24, 10**6)  # has no such number
    with pytest.raises(InputError, match=r"--max_new_tokens 41: .* 24 .* 64 .* at most 40 fit"):
        models.check_length(config, 24, 41)


def test_weights_that_cannot_be_trained(random_model, tmp_path, monkeypatch):
    """One too few, which would be random; one too many, such as an adapter's; NaN; no tokenizer."""
    model = random_model()
    weights = model.state_dict()
    del weights["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(InputError, match=f"{tmp_path}: .* no weights for model.norm.weight"):
        load_policy(str(tmp_path))
    adapted = model.state_dict() | {"model.norm.lora_A.weight": torch.ones(3)}
    model.save_pretrained(tmp_path, state_dict=adapted)
    with pytest.raises(InputError, match=f"{tmp_path}: .* weights model.norm.lora_A.weight; merge"):
        load_policy(str(tmp_path))
    adapter = random_model()  # peft puts an adapter beside merged weights on them once more
    adapter.model.norm.lora_A = torch.nn.Linear(1, 1)
    made = adapter, {"missing_keys": set(), "unexpected_keys": set()}
    with monkeypatch.context() as peft:
        peft.setattr(models, "load_pretrained", Mock(side_effect=[adapter.config, made]))
        with pytest.raises(InputError, match="no place for the weights model.norm.lora_A.bias"):
            models.load_model(str(tmp_path))
    untied = model.state_dict() | {"lm_head.weight": torch.ones(104, 32)}
    model.save_pretrained(tmp_path, state_dict=untied)
    with pytest.raises(InputError, match="its config ties its head to its embedding, not its"):
        load_policy(str(tmp_path))
    torch.nn.init.constant_(model.model.norm.weight, math.nan)
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"{tmp_path}: its logits are not finite"):
        load_policy(str(tmp_path))
    with pytest.raises(InputError, match=f"{tmp_path}: no tokenizer"):
        rollout.load_tokenizer(str(tmp_path))


def test_a_head_that_does_more(random_model, monkeypatch):
    """A scale, a bias or a soft cap, whatever its name: the model's own logits are compared."""
    model = random_model(spread=0.5)
    monkeypatch.setattr(rollout, "load_model", lambda name: model)
    load_policy("a model")
    for change in (
        lambda logits: 0.5 * logits,
        lambda logits: logits + torch.linspace(0, 1, logits.shape[-1]),
        lambda logits: 2 * torch.tanh(logits / 2),
    ):
        hook = model.lm_head.register_forward_hook(lambda *args, change=change: change(args[-1]))
        with pytest.raises(InputError, match="output head"):
            load_policy("a model")
        hook.remove()
