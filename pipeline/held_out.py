"""The held-out prompts and pairs: whose answers are better, and whether those who judge them can tell answers apart.

`evaluate` and `evaluate_dpo` share it, so that PPO's policy and DPO's stand side by side.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.baselines import rivals
from pipeline.batch import Pairs
from pipeline.classifier import Scorer
from pipeline.comparison import Answers, answer, figures, kl_figures, kl_per_answer, points, side_by_side, win_rates
from pipeline.data.examples import Prompt, comparisons, demonstrations, prompts
from pipeline.data.prepared import read_pairs
from pipeline.data.records import Pair
from pipeline.files import write_tsv
from pipeline.opening import open_base
from pipeline.pair_figures import gaps, pair_figures
from pipeline.params.evaluate import EvaluateParams
from pipeline.params.ppo import PPOParams
from pipeline.params.reward import RewardParams
from pipeline.rewards import Rewards, find_functions
from pipeline.roles import Policy
from pipeline.rollout import sampling_of
from pipeline.scorers import open_reward_model
from pipeline.stage import Stage
from pipeline.statistics import beside_baselines


@dataclass(frozen=True)
class HeldOut:
    """What is asked, who answers and who judges.

    roles: `base`, `sft` and what was trained from it, under the name of its adapter.
    rewards: what PPO is paid for.
    scorers: `reward`, the reward model, and `judge`.
    """

    cfg: EvaluateParams
    pairs: list[Pair]
    questions: list[Prompt]
    roles: dict[str, Policy]
    rewards: Rewards
    scorers: dict[str, Scorer]


def open_held_out(stage: Stage, trained: str) -> HeldOut:
    """Opens the base with all who take part; `trained` is the adapter that is set beside `sft`."""
    cfg, runtime = stage.params(EvaluateParams), stage.runtime
    pairs = read_pairs(stage.input("prepared/heldout.jsonl"))
    questions = prompts(pairs, stage.tokenizer)
    terms = stage.params(PPOParams, "ppo").reward
    functions = find_functions(terms)
    backbone = open_base(stage)
    for name in ("sft", trained):
        backbone.load_adapter(name, stage.input(f"artifacts/{name}"))
    watched = prompts(read_pairs(stage.input("prepared/development.jsonl")), stage.tokenizer)
    asked = [*questions, *watched]
    scorers = {name: open_reward_model(stage, backbone, name, asked) for name in ("reward", "judge")}
    rewards = Rewards(terms, functions, questions, stage.tokenizer, scorers["reward"], runtime.microbatch_tokens)
    adapters = {"base": None, "sft": "sft", trained: trained}
    roles = {role: Policy(backbone, name, cfg.temperature, runtime.logprob_chunk) for role, name in adapters.items()}
    return HeldOut(cfg, pairs, questions, roles, rewards, scorers)


def compare_answers(stage: Stage, held_out: HeldOut, folder: Path) -> dict[str, dict[str, Any]]:
    """All roles answer the prompts, sampled and greedily, with the same noise.

    Writes sampled.tsv and greedy.tsv into `folder`; the stage's curves get one row per sampled answer.

    Returns:
        figures by mode and role, and the median length of the chosen answers.
    """
    runtime, tokenizer, roles = stage.runtime, stage.tokenizer, held_out.roles
    sampled = sampling_of(tokenizer, runtime, stage.seed)
    judges = {"judge": held_out.scorers["judge"]}
    found: dict[str, dict[str, Answers]] = {"sampled": {}, "greedy": {}}
    metrics: dict[str, dict[str, Any]] = {"sampled": {}, "greedy": {}}
    with stage.progress(len(found) * len(roles)) as bar:
        for number, (mode, role) in enumerate(product(found, roles)):
            sampling = replace(sampled, greedy=mode == "greedy")
            theirs = answer(
                roles[role],
                held_out.rewards,
                judges,
                held_out.questions,
                sampling,
                tokenizer,
                runtime.microbatch_tokens,
            )
            found[mode][role] = theirs
            metrics[mode][role] = now = figures(theirs)
            bar.advance(number, reward=now["reward_mean"], length=now["length_mean"])
    for mode, answers in found.items():
        for role in roles.keys() - {"sft"}:
            metrics[mode][role] |= win_rates(answers[role], answers["sft"], held_out.cfg.bootstrap, stage.seed)
    kl: dict[str, Tensor] = {}
    for role, policy in roles.items():
        kl[role] = kl_per_answer(policy, roles["sft"], found["sampled"][role].rollout, runtime.microbatch_tokens)
        metrics["sampled"][role] |= kl_figures(kl[role], found["sampled"][role])
    chosen, _ = demonstrations(held_out.pairs, tokenizer)
    metrics["chosen_answers"] = {"length_median": float(chosen.response_lengths_B.float().median())}

    questions_text = [prompt.messages[-1].content for prompt in held_out.questions]
    for mode, answers in found.items():
        table = side_by_side(answers, questions_text)
        write_tsv(folder / f"{mode}.tsv", table)
        stage.tracker.log_table(f"before_and_after_{mode}", table)
    stage.curves = points(found["sampled"], kl)
    return metrics


def scorers_accuracy(stage: Stage, held_out: HeldOut) -> dict[str, dict[str, Any]]:
    """`pair_accuracy` of reward model and judge."""
    found = {}
    for name, model in held_out.scorers.items():
        cut_pairs = stage.params(RewardParams, name).cut_pairs
        gaps_of = partial(gaps, model, microbatch_tokens=stage.runtime.microbatch_tokens)
        found[f"{name}_model"] = pair_accuracy(stage, held_out, gaps_of, f"prepared/{name}.jsonl", cut_pairs)
    return found


def pair_accuracy(
    stage: Stage, held_out: HeldOut, gaps_of: Callable[[Pairs], Tensor], trained_on: str, cut_pairs: str
) -> dict[str, Any]:
    """How often a model prefers the chosen answer of a held-out pair, beside its rivals, and how far it can be believed.

    gaps_of: score of the chosen less that of the rejected answer; [B].
    trained_on: the model's training pairs; its rivals, length alone and a bag of words, are fitted on the same.
    """
    batch, kept, _ = comparisons(held_out.pairs, stage.tokenizer, cut_pairs)
    _, train, _ = comparisons(read_pairs(stage.input(trained_on)), stage.tokenizer, cut_pairs)
    gaps_B = gaps_of(batch)
    beside = beside_baselines(gaps_B, rivals(train, kept), held_out.cfg.bootstrap, stage.seed)
    return beside | pair_figures(gaps_B, batch)
