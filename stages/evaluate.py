"""Stage evaluate: base, SFT and policy answer the held-out prompts; who wins, at what KL, and at what length."""

from pathlib import Path

from pipeline.comparison import Answers, answer, figures, gaps, points, side_by_side, wins
from pipeline.data.examples import comparisons, prompts
from pipeline.data.prepared import read_pairs
from pipeline.files import write_tsv
from pipeline.opening import open_base
from pipeline.params.evaluate import EvaluateParams
from pipeline.params.reward import RewardParams
from pipeline.roles import Policy, RewardModel
from pipeline.rollout import Sampling
from pipeline.stage import Stage, run_stage
from pipeline.statistics import pair_accuracy
from pipeline.weights import load_head

ROLES = {"base": None, "sft": "sft", "policy": "policy"}
SCORERS = ("reward", "judge")
SAMPLES = Path("artifacts/evaluation/samples.tsv")


def evaluate(stage: Stage) -> None:
    """Writes metrics/evaluate.json, plots/evaluate.tsv, artifacts/evaluation."""
    cfg, runtime, tokenizer = stage.params(EvaluateParams), stage.runtime, stage.tokenizer
    pairs = read_pairs(stage.input("prepared/heldout.jsonl"))
    questions = prompts(pairs, tokenizer)
    backbone = open_base(stage)
    for name in ("sft", "policy", *SCORERS):
        backbone.load_adapter(name, stage.input(f"artifacts/{name}"))
    heads = {name: load_head(Path(f"artifacts/{name}"), backbone.hidden_size, backbone.device) for name in SCORERS}
    scorers = {name: RewardModel(backbone, name, head) for name, head in heads.items()}
    roles = {role: Policy(backbone, name, cfg.temperature, runtime.logprob_chunk) for role, name in ROLES.items()}
    sampling = Sampling(tokenizer.max_response, tokenizer.stop_ids, runtime.rollout_chunk, stage.seed)

    found: dict[str, Answers] = {}
    metrics: dict[str, dict] = {}
    with stage.progress(len(roles)) as bar, backbone.inference():
        for number, (role, policy) in enumerate(roles.items()):
            found[role] = answer(policy, roles["sft"], scorers, questions, sampling, tokenizer, runtime.microbatch_size)
            metrics[role] = figures(found[role])
            bar.advance(number, reward=metrics[role]["reward_mean"], KL=metrics[role]["kl_per_sequence_k1"])
        held_out, _, _ = comparisons(pairs, tokenizer, stage.params(RewardParams, "reward").cut_pairs)
        for name, model in scorers.items():
            gaps_B = gaps(model, held_out, runtime.microbatch_size)
            metrics[f"{name}_model"] = {"heldout_accuracy": pair_accuracy(gaps_B), "heldout_pairs": len(gaps_B)}
    for role in ("base", "policy"):
        metrics[role] |= wins(found[role], found["sft"], cfg.bootstrap, stage.seed)

    table = side_by_side(found, [prompt.messages[-1].content for prompt in questions])
    write_tsv(SAMPLES, table)
    stage.tracker.log_file(SAMPLES)
    stage.tracker.log_table("before_and_after", table)
    stage.curves = points(found)
    stage.finish(metrics)


if __name__ == "__main__":
    run_stage("evaluate", evaluate)
