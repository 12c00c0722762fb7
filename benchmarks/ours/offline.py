"""Steps of SFT and of the reward model by the stages' loop, on rows of random tokens, with the time of each."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from benchmarks.setting import Setting, microbatch
from benchmarks.work import Work, prompt_ids
from pipeline.backbone import Backbone
from pipeline.batch import Batch, Pairs, Sequences
from pipeline.data.examples import sequences
from pipeline.heads import reward_head
from pipeline.objectives.offline import bradley_terry, sft
from pipeline.offline import train_offline
from pipeline.roles import Policy, RewardModel
from pipeline.update import Optimizer, ParameterGroup, constant_after_warmup

LR = 1e-5
PEAK_NORM = 1.0


def rows_of(work: Work, step: int) -> Sequences:
    """Whole rows of random tokens, `work.prompt` of each a prompt."""
    whole = replace(work, prompt=work.row_tokens)
    return sequences([(ids[: work.prompt], ids[work.prompt :]) for ids in prompt_ids(whole, step)])


def sft_seconds(
    backbone: Backbone, setting: Setting, work: Work, synchronize: Callable[[], Any] = lambda: None
) -> list[float]:
    """Seconds of each step of SFT on a fresh adapter."""
    backbone.add_adapter("sft", setting.lora)
    model = Policy(backbone, "sft", temperature=1.0, logprob_chunk=setting.runtime.logprob_chunk)
    groups = [ParameterGroup("adapter", backbone.train("sft"), LR)]
    batches = (rows_of(work, step) for step in range(work.warmup + work.iterations))
    return _steps(
        model,
        batches,
        groups,
        lambda output, batch: sft(output.logprobs_BR, batch.response_mask_BR),
        setting,
        synchronize,
    )


def reward_seconds(
    backbone: Backbone, setting: Setting, work: Work, synchronize: Callable[[], Any] = lambda: None
) -> list[float]:
    """Seconds of each step of the reward model on a fresh adapter, over `work.rows` pairs."""
    backbone.add_adapter("reward", setting.lora)
    model = RewardModel(backbone, "reward", reward_head(backbone.hidden_size).to(backbone.device))
    groups = [
        ParameterGroup("adapter", backbone.train("reward"), LR),
        ParameterGroup("head", [model.head.linear.weight], LR),
    ]
    steps = work.warmup + work.iterations
    batches = (Pairs(rows_of(work, step), rows_of(work, steps + step)) for step in range(steps))
    return _steps(model, batches, groups, lambda scores, _: bradley_terry(*scores, 0.0, 0.0), setting, synchronize)


def _steps(
    model: Policy | RewardModel,
    batches: Iterator[Batch],
    groups: list[ParameterGroup],
    objective: Callable[[Any, Any], Any],
    setting: Setting,
    synchronize: Callable[[], Any],
) -> list[float]:
    synchronize()
    moments = [time.perf_counter()]

    def log(_: int, __: dict[str, float]) -> None:
        synchronize()
        moments.append(time.perf_counter())

    optimizer = Optimizer(groups, PEAK_NORM, constant_after_warmup(0))
    train_offline(model, batches, optimizer, objective, microbatch(setting.runtime), dropout=True, log=log)
    return [after - before for before, after in itertools.pairwise(moments)]
