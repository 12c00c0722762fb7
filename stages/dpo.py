"""Stage dpo: the policy, a copy of sft, learns from preference pairs without a reward model (Rafailov et al. 2023).

Its pairs are those of the reward model. Dropout is off: an implicit reward is a difference between policy and reference,
and dropout in one of the two would be noise in it, and more of it the longer the answer.
"""

from pathlib import Path

from torch import Tensor

from pipeline.data.examples import comparisons, epochs_of, steps_in
from pipeline.data.prepared import read_pairs
from pipeline.objectives.offline import dpo as dpo_objective
from pipeline.objectives.terms import Terms
from pipeline.offline import train_offline
from pipeline.opening import open_base
from pipeline.params.dpo import DPOParams
from pipeline.preferences import PairPolicy, ReferencedPairs, with_reference
from pipeline.recovery import recovery_of
from pipeline.roles import Policy
from pipeline.stage import Stage, run_stage
from pipeline.update import Optimizer, ParameterGroup, cosine_to_tenth


def dpo(stage: Stage) -> None:
    """Writes artifacts/dpo, metrics/dpo.json, plots/dpo.tsv."""
    cfg, runtime = stage.params(DPOParams), stage.runtime
    pairs, _, counts = comparisons(read_pairs(stage.input("prepared/reward.jsonl")), stage.tokenizer, cfg.cut_pairs)
    watched, _, _ = comparisons(read_pairs(stage.input("prepared/development.jsonl")), stage.tokenizer, cfg.cut_pairs)
    backbone = open_base(stage)
    backbone.load_adapter("sft", stage.input("artifacts/sft"))
    backbone.load_adapter("dpo", Path("artifacts/sft"))  # the policy starts as a copy of sft
    frozen = backbone.adapter_hash("sft")
    reference = Policy(backbone, "sft", temperature=1.0, logprob_chunk=runtime.logprob_chunk)
    model = PairPolicy(Policy(backbone, "dpo", temperature=1.0, logprob_chunk=runtime.logprob_chunk))
    pairs = with_reference(pairs, reference, cfg.batch_size, stage.seed, runtime.microbatch_tokens)
    watched = with_reference(watched, reference, len(watched), stage.seed, runtime.microbatch_tokens)

    def objective(logprobs: tuple[Tensor, Tensor], batch: ReferencedPairs) -> Terms:
        return dpo_objective(*logprobs, batch.ref_chosen_B, batch.ref_rejected_B, cfg.beta, cfg.label_smoothing)

    steps = steps_in(pairs, cfg.batch_size, cfg.epochs)
    optimizer = Optimizer(
        [ParameterGroup("adapter", backbone.train("dpo"), cfg.lr)],
        cfg.max_grad_norm,
        cosine_to_tenth(steps, cfg.warmup_share),
    )
    work = f"{len(pairs)} pairs in {steps} steps of {cfg.batch_size}"
    stage.tell_trained(optimizer.sizes, backbone.adapters, work)
    with stage.progress(steps) as bar:

        def log(step: int, stats: dict[str, float]) -> None:
            stage.log(step, stats)
            bar.advance(step, **{name: stats[name] for name in ("loss", "accuracy", "margin")})

        train_offline(
            model,
            epochs_of(pairs, cfg.batch_size, cfg.epochs, stage.seed),
            optimizer,
            objective,
            runtime.microbatch_tokens,
            dropout=False,
            log=log,
            recovery=recovery_of(stage),
        )
    assert frozen == backbone.adapter_hash("sft"), "the reference has moved"
    backbone.save_adapter("dpo", Path("artifacts/dpo"))
    development = objective(model.logprobs_all(watched, runtime.microbatch_tokens), watched).sums
    stage.finish(
        {
            **{f"development_{name}": float(value) / len(watched) for name, value in development.items()},
            "development_logprob_chosen_before": float(watched.ref_chosen_B.mean()),
            "development_pairs": len(watched),
            "steps": steps,
            "data": counts,
        }
    )


if __name__ == "__main__":
    run_stage("dpo", dpo)
