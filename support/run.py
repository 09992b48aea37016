"""The folder of a run: what is in it, what a resumed run cuts back, and what is due next."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch.optim import Optimizer
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer

from support import InputError, installed
from support.checkpoints import checkpoints, delete, save_checkpoint
from support.files import append_jsonl, must_be_empty, read_jsonl, write_jsonl, write_whole
from support.progress import log
from support.ranks import on_rank_0, rank


class RunFlags(Protocol):
    """Flags of a run that RunFolder reads; it writes all of them into config.json."""

    resume: str
    eval_every: int
    save_every: int
    keep_last: int


class RunFolder:
    """The directory of a run: config.json, metrics.jsonl, samples.jsonl, checkpoints and more.

    `step` is the last whole step. `checkpoint` is the folder to continue from, or None. Call
    `compare` when the data is loaded, then `begin`. Raises InputError.
    """

    def __init__(self, output: str, cfg: RunFlags):
        self.path, self.cfg = Path(output).resolve(), cfg  # a reward may change the directory
        self.checkpoint = on_rank_0(self.find_checkpoint)
        self.step = int(self.checkpoint.name.removeprefix("step_")) if self.checkpoint else 0
        self.saved = self.step
        self.id, self.config, self.evaluated_step = "", {}, -1  # `compare` and `begin` set them

    def find_checkpoint(self) -> Path | None:
        """Return the newest checkpoint.

        Raises InputError if a new run finds files, or a resumed run finds steps and no checkpoint,
        or one without the optimiser's moments.
        """
        if not self.cfg.resume:
            must_be_empty(self.path, f"continue a run with --resume {self.path}, or name")
        newest = max(checkpoints(self.path), default=None)
        if newest is None and any(line["step"] > 0 for line in self.lines()):
            what = "holds no checkpoint; start anew in another --output"
            raise InputError(f"--resume {self.path}: {what}")
        if newest and not (newest / "trainer" / ".metadata").exists():
            hint = f"its weights can begin a new run, with --model {newest}"
            raise InputError(f"--resume {self.path}: {newest.name} has no whole trainer/; {hint}")
        return newest

    def compare(self, data_fingerprint: str) -> None:
        """Compare the flags with config.json: sets `config`, and `id`, the run's name for trackers.

        data_fingerprint: of the problems. Raises InputError if a resumed run would go on with other
        problems, another template, or from another place in the data.
        """
        self.config = on_rank_0(lambda: self.new_config(data_fingerprint))
        self.id = self.config["id"]

    def begin(self) -> None:
        """Write config.json, and cut records back to the checkpoint: later steps come again."""
        text = json.dumps(self.config, indent=2) + "\n"
        on_rank_0(lambda: write_whole(self.path / "config.json", text))
        self.evaluated_step = on_rank_0(self.cut_back)

    def new_config(self, data_fingerprint: str) -> dict[str, Any]:
        """Return what config.json will hold.

        A resumed run can have other flags than before. They are printed, and `changes` has them
        with the last step before them.
        """
        file = self.path / "config.json"
        now = asdict(self.cfg) | {"data_fingerprint": data_fingerprint}
        stored = json.loads(file.read_text("utf-8")) if file.exists() else {}
        changed = {
            name: [stored[name], value]
            for name, value in now.items()
            if name not in ("output", "resume") and stored.get(name, value) != value
        }
        words = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())
        # The place in the data is the number of steps times batch_size.
        if changed.keys() & {"data_fingerprint", "chat_template", "batch_size"}:
            what = "a run keeps its problems, its chat template and its batch_size"
            raise InputError(f"--resume {self.path}: {what} ({words})")
        changes = stored.get("changes", [])
        if changed:
            log(f"changed after step {self.step}: {words}")
            changes.append({"step": self.step} | changed)
        own = stored.get("id") or f"{self.path.name}-{os.urandom(4).hex()}"
        return now | {"versions": installed(), "changes": changes, "id": own}

    def cut_back(self) -> int:
        """Remove what is newer than the checkpoint. Return the last evaluated step, or -1."""
        for end in ("partial", "deleted"):
            for half in self.path.glob(f"checkpoints/step_*.{end}"):
                delete(half)
        for name in ("metrics.jsonl", "samples.jsonl"):
            lines = read_jsonl(self.path / name)
            write_jsonl(self.path / name, [line for line in lines if line["step"] <= self.step])
        return max((line["step"] for line in self.lines() if "eval" in line), default=-1)

    def end_step(self, line: dict[str, Any], sample_log: list[dict]) -> None:
        """Append a whole step to metrics.jsonl, and the log of its responses to samples.jsonl."""
        self.step = line["step"]
        if rank() == 0:
            sample_log = [{"step": self.step} | sample for sample in sample_log]
            append_jsonl(self.path / "samples.jsonl", sample_log)
            # JSON has no NaN and no infinity: they become null.
            unusable = [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
            append_jsonl(self.path / "metrics.jsonl", [line | dict.fromkeys(unusable)])

    def evaluation_is_due(self) -> bool:
        """Whether the last whole step (0: none yet) must be evaluated, and was not yet."""
        every = self.cfg.eval_every  # 0: never
        return every > 0 and self.step % every == 0 and self.step > self.evaluated_step

    def end_evaluation(self, scores: dict[str, dict], responses: list[dict]) -> None:
        """Write the responses of an evaluation after the last whole step, and its scores."""
        self.evaluated_step = self.step
        if rank() == 0:
            (self.path / "evaluations").mkdir(exist_ok=True)
            write_jsonl(self.path / "evaluations" / f"step_{self.step:06d}.jsonl", responses)
            append_jsonl(self.path / "metrics.jsonl", [{"step": self.step, "eval": scores}])

    def lines(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl."""
        return read_jsonl(self.path / "metrics.jsonl")

    def save_is_due(self) -> bool:
        """Whether the last whole step needs a checkpoint. An evaluation has one before it."""
        every = self.cfg.save_every  # 0: never
        return self.evaluation_is_due() or (every > 0 and self.step % every == 0)

    def save(self, model: Model, optimizer: Optimizer, tokenizer: Tokenizer) -> None:
        """Save the last whole step unless that is done. The newest --keep_last checkpoints stay."""
        if self.step > self.saved:
            folder = self.path / "checkpoints" / f"step_{self.step:06d}"
            save_checkpoint(folder, model, optimizer, tokenizer)
            self.saved = self.step
            if rank() == 0:
                for old in checkpoints(self.path)[: -self.cfg.keep_last]:
                    delete(old)
