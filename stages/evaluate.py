"""Stage evaluate: base, SFT and policy answer the held-out prompts; who wins, at what KL, and at what length.

The judge shares backbone and data style with the reward model, so it is not independent evidence.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

from torch import Tensor

from pipeline.baselines import rivals
from pipeline.comparison import Answers, answer, figures, kl_figures, kl_per_answer, points, side_by_side, win_rates
from pipeline.data.examples import comparisons, demonstrations, prompts
from pipeline.data.prepared import read_pairs
from pipeline.development import ANSWERS, over_optimisation, read_watched
from pipeline.files import write_tsv
from pipeline.opening import open_base, open_reward_model
from pipeline.pair_figures import gaps, pair_figures
from pipeline.params.evaluate import EvaluateParams
from pipeline.params.ppo import PPOParams
from pipeline.params.reward import RewardParams
from pipeline.rewards import Rewards, find_functions
from pipeline.roles import Policy
from pipeline.rollout import Sampling
from pipeline.stage import Stage, run_stage
from pipeline.statistics import beside_baselines

ROLES = {"base": None, "sft": "sft", "policy": "policy"}
SCORERS = ("reward", "judge")
FOLDER = Path("artifacts/evaluation")


def evaluate(stage: Stage) -> None:
    """Writes metrics/evaluate.json, plots/evaluate.tsv, plots/overoptimisation.tsv, artifacts/evaluation."""
    cfg, runtime, tokenizer = stage.params(EvaluateParams), stage.runtime, stage.tokenizer
    pairs = read_pairs(stage.input("prepared/heldout.jsonl"))
    questions = prompts(pairs, tokenizer)
    terms = stage.params(PPOParams, "ppo").reward
    functions = find_functions(terms)
    backbone = open_base(stage)
    for name in ("sft", "policy"):
        backbone.load_adapter(name, stage.input(f"artifacts/{name}"))
    scorers = {name: open_reward_model(stage, backbone, name) for name in SCORERS}
    rewards = Rewards(terms, functions, questions, tokenizer, scorers["reward"], runtime.microbatch_size)
    judges = {"judge": scorers["judge"]}
    roles = {role: Policy(backbone, name, cfg.temperature, runtime.logprob_chunk) for role, name in ROLES.items()}
    sampled = Sampling(tokenizer.max_response, tokenizer.stop_ids, runtime.rollout_chunk, stage.seed)
    found: dict[str, dict[str, Answers]] = {"sampled": {}, "greedy": {}}
    metrics: dict[str, dict] = {"sampled": {}, "greedy": {}}
    kl: dict[str, Tensor] = {}
    with stage.progress(len(found) * len(roles)) as bar:
        for number, (mode, role) in enumerate(product(found, roles)):
            sampling = replace(sampled, greedy=mode == "greedy")
            theirs = answer(roles[role], rewards, judges, questions, sampling, tokenizer, runtime.microbatch_size)
            found[mode][role] = theirs
            metrics[mode][role] = now = figures(theirs)
            bar.advance(number, reward=now["reward_mean"], length=now["length_mean"])
    for role, policy in roles.items():
        kl[role] = kl_per_answer(policy, roles["sft"], found["sampled"][role].rollout, runtime.microbatch_size)

    for mode, answers in found.items():
        for role in ("base", "policy"):
            metrics[mode][role] |= win_rates(answers[role], answers["sft"], cfg.bootstrap, stage.seed)
    for role in roles:
        metrics["sampled"][role] |= kl_figures(kl[role], found["sampled"][role])
    chosen, _ = demonstrations(pairs, tokenizer)
    metrics["chosen_answers"] = {"length_median": float(chosen.response_lengths_B.float().median())}
    for name, model in scorers.items():
        cut_pairs = stage.params(RewardParams, name).cut_pairs
        batch, kept, _ = comparisons(pairs, tokenizer, cut_pairs)
        _, train, _ = comparisons(read_pairs(stage.input(f"prepared/{name}.jsonl")), tokenizer, cut_pairs)
        gaps_B = gaps(model, batch, runtime.microbatch_size)
        beside = beside_baselines(gaps_B, rivals(train, kept), cfg.bootstrap, stage.seed)
        metrics[f"{name}_model"] = beside | pair_figures(gaps_B, batch)

    questions_text = [prompt.messages[-1].content for prompt in questions]
    for mode, answers in found.items():
        table = side_by_side(answers, questions_text)
        write_tsv(FOLDER / f"{mode}.tsv", table)
        stage.tracker.log_table(f"before_and_after_{mode}", table)
    watched = read_watched(stage.input(str(ANSWERS)))
    curve = over_optimisation(watched, scorers["judge"], runtime.microbatch_size, cfg.bootstrap, stage.seed)
    write_tsv(Path("plots/overoptimisation.tsv"), curve)
    stage.curves = points(found["sampled"], kl)
    stage.finish(metrics)


if __name__ == "__main__":
    run_stage("evaluate", evaluate)
