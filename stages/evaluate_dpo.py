"""Stage evaluate_dpo: what stage evaluate asks of PPO's policy is asked of DPO's, with the same prompts and the same noise.

DPO's policy is also a reward model: its log-ratio to SFT is what it thinks of an answer (Rafailov et al. 2023, section 5.1).
"""

from functools import partial
from pathlib import Path

from pipeline.held_out import compare_answers, load_scorers, pair_accuracy, scorers_accuracy
from pipeline.opening import open_base
from pipeline.params.dpo import DPOParams
from pipeline.params.evaluate import EvaluateParams
from pipeline.preferences import implicit_gaps
from pipeline.roles import Policy
from pipeline.stage import Stage, run_stage


def evaluate_dpo(stage: Stage) -> None:
    """Writes metrics/evaluate_dpo.json, plots/evaluate_dpo.tsv, artifacts/evaluation_dpo."""
    cfg, runtime = stage.params(EvaluateParams), stage.runtime
    backbone = open_base(stage)
    scorers = load_scorers(stage, backbone)
    metrics = compare_answers(stage, cfg, backbone, scorers, "dpo", Path("artifacts/evaluation_dpo"))
    metrics |= scorers_accuracy(stage, cfg, scorers)
    policy, reference = (Policy(backbone, name, 1.0, runtime.logprob_chunk) for name in ("dpo", "sft"))
    gaps_of = partial(implicit_gaps, policy, reference, microbatch_size=runtime.microbatch_size)
    cut_pairs = stage.params(DPOParams, "dpo").cut_pairs
    metrics["dpo_model"] = pair_accuracy(stage, cfg, gaps_of, "prepared/reward.jsonl", cut_pairs)
    stage.finish(metrics)


if __name__ == "__main__":
    run_stage("evaluate_dpo", evaluate_dpo, section="evaluate")
