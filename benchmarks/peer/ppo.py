"""TRL's PPOTrainer on the same work, timed from outside: its source is not changed.

It holds the policy with its adapter (the reference is the adapter switched off), and copies of the model for reward and value; the value copy
is trained whole unless `value` says otherwise. Its module's helpers are wrapped with timers, iterations are bounded by callbacks.
`bf16=True` is ignored by TRL's PPO, which builds an Accelerator of its own; the weights are loaded in bfloat16 instead.
"""

import contextlib
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import trl.experimental.ppo.ppo_trainer as trl_ppo
from datasets import Dataset
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.peer.common import PACKAGES, lora_settings, prepare, tokenizer_of
from benchmarks.probe import Figures, serve
from benchmarks.work import Work, prompt_ids

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SPARE = (
    2  # batches: on a data set's last one accelerate steps the optimizer after every micro-batch, which is other work
)


@dataclass(frozen=True)
class Setting:
    """microbatch: rows per forward and backward.

    scoring_batch: rows per sampling and scoring pass (TRL's default 64: all at once).
    value: the value copy is trained whole (TRL's default), or by LoRA. adapters: float32 (PEFT's default) or 16 bits.
    """

    microbatch: int
    scoring_batch: int = 64
    value: str = "full"
    adapters: str = "float32"


class Stopwatch(TrainerCallback):
    """Seconds of each iteration and of its beats, by the moments at which TRL passes from one to the next."""

    def __init__(self) -> None:
        self.seconds: list[dict[str, float]] = []
        self.lengths: set[int] = set()
        self.optimizer_steps = 0
        self._marks: dict[str, float] = {}

    def mark_first(self, name: str) -> None:
        """Now, unless it was already in this iteration."""
        self._marks.setdefault(name, time.perf_counter())

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first iteration begins."""
        self.mark_first("begin")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """An iteration ends, and the next begins."""
        now, marks = time.perf_counter(), self._marks
        self.seconds.append(
            {
                "iteration": now - marks["begin"],
                "rollout": marks["sampled"] - marks["begin"],
                "evaluate": marks["first forward"] - marks["sampled"],
                "update": marks["figures"] - marks["first forward"],
            }
        )
        self._marks = {"begin": now}

    def listen(self, trainer: PPOTrainer) -> None:
        """Puts the marks into TRL's helpers. Its bookkeeping of figures begins with the first `gather_for_metrics`."""
        sample, forward = trl_ppo.batch_generation, trl_ppo.forward
        gather, step = trainer.accelerator.gather_for_metrics, trainer.optimizer.step

        def batch_generation(model: nn.Module, queries: torch.Tensor, *rest: Any) -> Any:
            answers, logits = sample(model, queries, *rest)
            self.mark_first("sampled")
            self.lengths.add(answers.shape[1] - queries.shape[1])
            return answers, logits

        def marked_forward(*arguments: Any) -> Any:
            if torch.is_grad_enabled():
                self.mark_first("first forward")
            return forward(*arguments)

        def gather_for_metrics(*arguments: Any, **keys: Any) -> Any:
            self.mark_first("figures")
            return gather(*arguments, **keys)

        def counted_step(*arguments: Any, **keys: Any) -> Any:
            self.optimizer_steps += trainer.accelerator.sync_gradients
            return step(*arguments, **keys)

        trl_ppo.batch_generation, trl_ppo.forward = batch_generation, marked_forward
        trainer.accelerator.gather_for_metrics, trainer.optimizer.step = gather_for_metrics, counted_step


def make_trainer(folder: Path, work: Work, setting: Setting, stopwatch: Stopwatch, scratch: str) -> PPOTrainer:
    """Everything that TRL needs: four roles on three copies of the model."""
    tokenizer = tokenizer_of(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.bfloat16) for _ in range(2)
    )
    for model in (policy, reward, value):
        model.config.pad_token_id = tokenizer.pad_token_id
    policy.generation_config.pad_token_id = tokenizer.pad_token_id
    reward.requires_grad_(False)  # TRL never trains it; this only spares bookkeeping
    lora = lora_settings(work)
    if setting.value == "lora":
        value = inject_adapter_in_model(
            LoraConfig(**(lora | {"target_modules": LINEARS, "task_type": "SEQ_CLS"})), value
        )
        value.score.requires_grad_(True)
    iterations = work.warmup + work.iterations
    rows = [ids for iteration in range(iterations + SPARE) for ids in prompt_ids(work, iteration)]
    trainer = PPOTrainer(
        args=_config(work, setting, iterations, scratch),
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **lora),
        callbacks=[stopwatch],
    )
    if setting.adapters == "bfloat16":
        for name, parameter in trainer.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    return trainer


def _config(work: Work, setting: Setting, iterations: int, scratch: str) -> PPOConfig:
    return PPOConfig(
        output_dir=scratch,
        use_cpu=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=setting.microbatch,
        gradient_accumulation_steps=work.rows // setting.microbatch,
        num_mini_batches=1,
        num_ppo_epochs=work.epochs,
        total_episodes=iterations * work.rows,
        response_length=work.response,
        stop_token=None,
        stop_token_id=None,
        temperature=1.0,
        num_sample_generations=0,
        local_rollout_forward_batch_size=setting.scoring_batch,
        learning_rate=1e-5,
        kl_coef=0.05,
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )


def run(request: dict[str, Any]) -> Figures:
    """Seconds of each measured iteration's beats."""
    work, setting = Work(**request["work"]), Setting(**request["setting"])
    prepare(work)
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        trainer = make_trainer(Path(request["model"]), work, setting, stopwatch, scratch)
        stopwatch.listen(trainer)
        trainer.train()
    _check_equal_work(stopwatch, work)
    return {"seconds": stopwatch.seconds[work.warmup :]}


def _check_equal_work(stopwatch: Stopwatch, work: Work) -> None:
    """Every answer has the full length, and the optimizer stepped once per epoch."""
    steps = (work.warmup + work.iterations) * work.epochs
    assert stopwatch.lengths == {work.response}, f"answers of {stopwatch.lengths} tokens"
    assert stopwatch.optimizer_steps == steps, f"{stopwatch.optimizer_steps} optimizer steps"


if __name__ == "__main__":
    serve(run, PACKAGES)
