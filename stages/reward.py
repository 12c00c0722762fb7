"""Stages reward and judge: an adapter that starts as a copy of sft, and a scalar head, trained on preference pairs.

`judge` is the same work on other pairs with another seed; only `evaluate` reads it, PPO never does.
"""

import sys
from pathlib import Path

import torch

from pipeline.baselines import rivals
from pipeline.data.examples import comparisons, demonstrations, epochs_of, steps_in
from pipeline.data.prepared import read_demonstrations, read_pairs
from pipeline.heads import reward_head
from pipeline.objectives.offline import bradley_terry
from pipeline.offline import train_offline
from pipeline.opening import open_base
from pipeline.pair_figures import gaps, pair_figures
from pipeline.params.reward import RewardParams
from pipeline.recovery import recovery_of
from pipeline.roles import RewardModel
from pipeline.stage import Stage, run_stage
from pipeline.statistics import wins
from pipeline.update import Optimizer, ParameterGroup, cosine_to_tenth
from pipeline.weights import save_head


def reward(stage: Stage) -> None:
    """Writes artifacts/NAME, metrics/NAME.json, plots/NAME.tsv; NAME is reward or judge."""
    cfg = stage.params(RewardParams)
    pairs, kept, counts = comparisons(
        read_pairs(stage.input(f"prepared/{stage.name}.jsonl")), stage.tokenizer, cfg.cut_pairs
    )
    watched, watched_kept, _ = comparisons(
        read_pairs(stage.input("prepared/development.jsonl")), stage.tokenizer, cfg.cut_pairs
    )
    anchors, _ = demonstrations(read_demonstrations(stage.input("prepared/sft.jsonl")), stage.tokenizer)
    backbone = open_base(stage)
    backbone.load_adapter(stage.name, stage.input("artifacts/sft"))
    head = reward_head(backbone.hidden_size).to(backbone.device)
    model = RewardModel(backbone, stage.name, head)

    steps = steps_in(pairs, cfg.batch_size, cfg.epochs)
    groups = [
        ParameterGroup("adapter", backbone.train(stage.name), cfg.lr),
        ParameterGroup("head", [head.linear.weight], cfg.head_lr),
    ]
    optimizer = Optimizer(groups, cfg.max_grad_norm, cosine_to_tenth(steps, cfg.warmup_share))
    stage.tell_trained(optimizer.sizes)
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
    # The loss knows only differences; the shift makes 0 the mean score of the answers that SFT was trained on.
    with torch.no_grad():
        head.linear.bias -= model.score_all(anchors, stage.runtime.microbatch_tokens).mean()
    folder = Path(f"artifacts/{stage.name}")
    backbone.save_adapter(stage.name, folder)
    save_head(head, folder)
    gaps_B = gaps(model, watched, stage.runtime.microbatch_tokens)
    stage.finish(
        {
            "development_accuracy": float(wins(gaps_B, torch.zeros_like(gaps_B)).mean()),
            **{
                f"development_accuracy_{rival}": float(right_B.mean())
                for rival, right_B in rivals(kept, watched_kept).items()
            },
            **{f"development_{name}": value for name, value in pair_figures(gaps_B, watched).items()},
            "development_gap": float(gaps_B.mean()),
            "development_pairs": len(watched),
            "steps": steps,
            "data": counts,
        }
    )


if __name__ == "__main__":
    run_stage(sys.argv[1] if len(sys.argv) > 1 else "reward", reward)
