"""The held-out prompts and pairs: who answers better, by reward model and judge, and whether these can tell answers apart.

`evaluate` and `evaluate_dpo` share it, so that PPO's policy and DPO's stand side by side.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from torch import Tensor

from pipeline.backbone import Backbone
from pipeline.baselines import bag_of_words, length_alone
from pipeline.batch import Pairs
from pipeline.comparison import (
    Answers,
    Scorers,
    answer,
    figures,
    gaps,
    kl_figures,
    kl_per_answer,
    points,
    side_by_side,
    win_rates,
)
from pipeline.data.examples import comparisons, demonstrations, prompts
from pipeline.data.prepared import read_pairs
from pipeline.files import write_tsv
from pipeline.params.evaluate import EvaluateParams
from pipeline.params.reward import RewardParams
from pipeline.roles import Policy, RewardModel
from pipeline.rollout import Sampling
from pipeline.stage import Stage
from pipeline.statistics import beside_baselines
from pipeline.weights import load_head

SCORERS = ("reward", "judge")
HELD_OUT = "prepared/heldout.jsonl"


def load_scorers(stage: Stage, backbone: Backbone) -> Scorers:
    """The reward model and the judge."""
    for name in SCORERS:
        backbone.load_adapter(name, stage.input(f"artifacts/{name}"))
    heads = {name: load_head(Path(f"artifacts/{name}"), backbone.hidden_size, backbone.device) for name in SCORERS}
    return {name: RewardModel(backbone, name, head) for name, head in heads.items()}


def compare_answers(
    stage: Stage, cfg: EvaluateParams, backbone: Backbone, scorers: Scorers, trained: str, folder: Path
) -> dict[str, dict]:
    """Base, SFT and the policy `trained` answer the held-out prompts, sampled and greedily, with the same noise.

    Loads the adapters `sft` and `trained`; writes sampled.tsv and greedy.tsv into `folder`; the stage's curves get one row
    per sampled answer.

    Returns:
        figures by mode and role, and the median length of the chosen answers.
    """
    runtime, tokenizer = stage.runtime, stage.tokenizer
    pairs = read_pairs(stage.input(HELD_OUT))
    questions = prompts(pairs, tokenizer)
    for name in ("sft", trained):
        backbone.load_adapter(name, stage.input(f"artifacts/{name}"))
    adapters = {"base": None, "sft": "sft", trained: trained}
    roles = {role: Policy(backbone, name, cfg.temperature, runtime.logprob_chunk) for role, name in adapters.items()}
    sampled = Sampling(tokenizer.max_response, tokenizer.stop_ids, runtime.rollout_chunk, stage.seed)
    found: dict[str, dict[str, Answers]] = {"sampled": {}, "greedy": {}}
    with stage.progress(len(found) * len(roles)) as bar:
        for number, (mode, role) in enumerate(product(found, roles)):
            sampling = replace(sampled, greedy=mode == "greedy")
            theirs = answer(roles[role], scorers, questions, sampling, tokenizer, runtime.microbatch_size)
            found[mode][role] = theirs
            bar.advance(
                number, reward=float(theirs.scores["reward"].mean()), length=float(theirs.lengths_B.float().mean())
            )
    kl = {
        role: kl_per_answer(policy, roles["sft"], found["sampled"][role].rollout, runtime.microbatch_size)
        for role, policy in roles.items()
    }
    questions_text = [prompt.messages[-1].content for prompt in questions]
    for mode, answers in found.items():
        table = side_by_side(answers, questions_text)
        write_tsv(folder / f"{mode}.tsv", table)
        stage.tracker.log_table(f"before_and_after_{mode}", table)
    stage.curves = points(found["sampled"], kl)
    chosen, _ = demonstrations(pairs, tokenizer)
    length_median = float(chosen.response_lengths_B.float().median())
    return _figures(found, kl, cfg.bootstrap, stage.seed) | {"chosen_answers": {"length_median": length_median}}


def _figures(
    found: dict[str, dict[str, Answers]], kl: dict[str, Tensor], resamples: int, seed: int
) -> dict[str, dict[str, dict]]:
    metrics: dict[str, dict[str, dict]] = {}
    for mode, answers in found.items():
        metrics[mode] = {role: figures(theirs) for role, theirs in answers.items()}
        for role in answers.keys() - {"sft"}:
            metrics[mode][role] |= win_rates(answers[role], answers["sft"], resamples, seed)
    for role, theirs in found["sampled"].items():
        metrics["sampled"][role] |= kl_figures(kl[role], theirs)
    return metrics


def scorers_accuracy(stage: Stage, cfg: EvaluateParams, scorers: Scorers) -> dict[str, dict]:
    """`pair_accuracy` of reward model and judge."""
    found = {}
    for name, model in scorers.items():
        cut_pairs = stage.params(RewardParams, name).cut_pairs
        gaps_of = partial(gaps, model, microbatch_size=stage.runtime.microbatch_size)
        found[f"{name}_model"] = pair_accuracy(stage, cfg, gaps_of, f"prepared/{name}.jsonl", cut_pairs)
    return found


def pair_accuracy(
    stage: Stage, cfg: EvaluateParams, gaps_of: Callable[[Pairs], Tensor], trained_on: str, cut_pairs: str
) -> dict[str, object]:
    """How often the chosen answer of a held-out pair is preferred, beside length alone and a bag of words.

    gaps_of: preference for the chosen answer of each pair, negative where the rejected one is preferred; [B].
    trained_on: the pairs that the model was trained on; the two rivals are fitted on the same.
    """
    batch, kept, _ = comparisons(read_pairs(stage.input(HELD_OUT)), stage.tokenizer, cut_pairs)
    _, train, _ = comparisons(read_pairs(stage.input(trained_on)), stage.tokenizer, cut_pairs)
    rivals = {"length_alone": length_alone(train, kept), "bag_of_words": bag_of_words(train, kept)}
    return beside_baselines(gaps_of(batch), rivals, cfg.bootstrap, stage.seed)
