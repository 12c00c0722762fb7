"""Stage evaluate_dpo: what stage evaluate asks of PPO's policy is asked of DPO's, with the same prompts and the same noise.

DPO's policy is a reward model too: its implicit reward says which of two answers it prefers (Rafailov et al. 2023, section 5.1).
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.candidate import stand
from pipeline.held_out import compare_answers, open_held_out, pair_accuracy, scorers_accuracy
from pipeline.params.dpo import DPOParams
from pipeline.preferences import implicit_gaps
from pipeline.stage import Stage, run_stage


def evaluate_dpo(stage: Stage) -> None:
    """Writes metrics/evaluate_dpo.json, plots/evaluate_dpo.tsv, artifacts/evaluation_dpo."""
    dpo = stage.params(DPOParams, "dpo")
    held_out = open_held_out(stage, "dpo")
    metrics = compare_answers(stage, held_out, Path("artifacts/evaluation_dpo")) | scorers_accuracy(stage, held_out)
    # at temperature 1, as in training, whatever the answers were sampled at
    policy, reference = (replace(held_out.roles[role], temperature=1.0) for role in ("dpo", "sft"))
    gaps_of = partial(
        implicit_gaps, policy, reference, beta=dpo.beta, microbatch_tokens=stage.runtime.microbatch_tokens
    )
    metrics["dpo_model"] = pair_accuracy(stage, held_out, gaps_of, "prepared/reward.jsonl", dpo.cut_pairs)
    stage.finish(metrics)
    stand(stage, metrics, "dpo", held_out.cfg.temperature, held_out.cfg.bootstrap)


if __name__ == "__main__":
    run_stage("evaluate_dpo", evaluate_dpo, section="evaluate")
