"""Stages reward and judge: an adapter that starts as a copy of sft, and a scalar head, trained on preference pairs;
or a model of the person's own (`reward.from`, `judge.from`).

`judge` is the same work on other pairs with another seed; only `evaluate` reads it, PPO never does.
"""

import sys
from pathlib import Path

from torch.nn.functional import logsigmoid

from pipeline.backbone import Backbone
from pipeline.batch import Pairs
from pipeline.data.examples import comparisons, demonstrations, epochs_of, prompts, steps_in
from pipeline.data.prepared import read_demonstrations, read_pairs
from pipeline.heads import reward_head
from pipeline.objectives.offline import bradley_terry
from pipeline.offline import train_offline
from pipeline.opening import open_base
from pipeline.pair_figures import development_figures, gaps
from pipeline.params.reward import RewardParams
from pipeline.recovery import recovery_of
from pipeline.roles import RewardModel
from pipeline.scorers import open_own_reward_model, save_reward_model
from pipeline.stage import Stage, run_stage
from pipeline.update import Optimizer, ParameterGroup, cosine_to_tenth


def reward(stage: Stage) -> None:
    """Writes artifacts/NAME, metrics/NAME.json, plots/NAME.tsv; NAME is reward or judge."""
    cfg = stage.params(RewardParams)
    pairs, kept, counts = comparisons(
        read_pairs(stage.input(f"prepared/{stage.name}.jsonl")), stage.tokenizer, cfg.cut_pairs
    )
    watched, watched_kept, _ = comparisons(
        read_pairs(stage.input("prepared/development.jsonl")), stage.tokenizer, cfg.cut_pairs
    )
    shown = read_demonstrations(stage.input("prepared/sft.jsonl"))
    anchors, _ = demonstrations(shown, stage.tokenizer)
    backbone = open_base(stage)
    steps, origin = 0, None
    if cfg.from_ is None:
        model, steps = train(stage, cfg, backbone, pairs)
    else:
        model, origin = open_own_reward_model(
            stage, backbone, stage.name, prompts([*shown, *watched_kept], stage.tokenizer)
        )
    # The loss knows only differences; the shift makes 0 the mean score of the answers that SFT was trained on.
    model.move(-model.score_all(anchors, stage.runtime.microbatch_tokens).mean())
    save_reward_model(model, Path(f"artifacts/{stage.name}"), origin)
    gaps_B = gaps(model, watched, stage.runtime.microbatch_tokens)
    figures = development_figures(gaps_B, kept, watched, watched_kept)
    if not steps:  # the curve of what was not trained here: one point, on the development pairs
        stage.log(0, {"loss": float(-logsigmoid(gaps_B).mean()), "accuracy": figures["development_accuracy"]})
    stage.finish({**figures, "steps": steps, "data": counts})


def train(stage: Stage, cfg: RewardParams, backbone: Backbone, pairs: Pairs) -> tuple[RewardModel, int]:
    """The reward model, and the number of steps."""
    backbone.load_adapter(stage.name, stage.input("artifacts/sft"))
    head = reward_head(backbone.hidden_size).to(backbone.device)
    model = RewardModel(backbone, stage.name, head)
    steps = steps_in(pairs, cfg.batch_size, cfg.epochs)
    groups = [
        ParameterGroup("adapter", backbone.train(stage.name), cfg.lr),
        ParameterGroup("head", [head.linear.weight], cfg.head_lr),
    ]
    optimizer = Optimizer(groups, cfg.max_grad_norm, cosine_to_tenth(steps, cfg.warmup_share))
    work = f"{len(pairs)} pairs in {steps} steps of {cfg.batch_size}"
    stage.tell_trained(optimizer.sizes, backbone.adapters, work)
    with stage.progress(steps) as bar:

        def log(step: int, stats: dict[str, float]) -> None:
            stage.log(step, stats)
            bar.advance(step, loss=stats["loss"], accuracy=stats["accuracy"])

        train_offline(
            model,
            epochs_of(pairs, cfg.batch_size, cfg.epochs, stage.seed),
            optimizer,
            lambda scores, _: bradley_terry(*scores, cfg.margin, cfg.label_smoothing),
            stage.runtime.microbatch_tokens,
            dropout=True,
            log=log,
            recovery=recovery_of(stage),
        )
    return model, steps


if __name__ == "__main__":
    run_stage(sys.argv[1] if len(sys.argv) > 1 else "reward", reward)
