"""Stage ppo: the policy, a copy of sft, is moved toward higher scores at a price per nat of KL to the frozen sft.

`ppo.algorithm` says how: PPO, REINFORCE, RLOO or GRPO.
"""

import math
from pathlib import Path

from torch import Tensor

from pipeline.batch import Experience
from pipeline.comparison import Answers, answer, kl_per_answer
from pipeline.data.examples import prompts
from pipeline.data.prepared import read_pairs, read_prompts
from pipeline.development import Development
from pipeline.loop import open_loop
from pipeline.online import optimizer_for, prompts_in_turn
from pipeline.params.ppo import PPOParams
from pipeline.progress import tell
from pipeline.recovery import recovery_of
from pipeline.roles import RewardModel
from pipeline.samples import sample_rows
from pipeline.stage import Stage, run_stage
from pipeline.weights import save_head

FOLDER = Path("artifacts/policy")
WATCHED = ("score_mean", "kl_per_sequence_k1", "length_mean", "end_token_rate", "entropy", "explained_variance")


def ppo(stage: Stage) -> None:
    """Writes artifacts/policy, artifacts/development, metrics/ppo.json, plots/ppo.tsv."""
    cfg, runtime, tokenizer = stage.params(PPOParams), stage.runtime, stage.tokenizer
    questions = prompts(read_prompts(stage.input("prepared/ppo.jsonl")), tokenizer)
    asked = prompts_in_turn(questions, cfg, stage.seed)
    watched = prompts(read_pairs(stage.input("prepared/development.jsonl")), tokenizer)
    tell(cfg.notes)
    loop = open_loop(stage, cfg, [*questions, *watched])
    policy, reference, rewards = loop.policy, loop.reference, loop.rewards
    frozen_names = ("sft", "reward") if isinstance(loop.reward_model, RewardModel) else ("sft",)
    frozen = {name: policy.backbone.adapter_hash(name) for name in frozen_names}
    optimizer = optimizer_for(policy, cfg)
    work = f"{cfg.iterations} iterations of {cfg.rollout_size} answers to {len(questions)} prompts"
    stage.tell_trained(optimizer.sizes, policy.backbone.adapters, work)

    def sample() -> tuple[Answers, Tensor]:
        found = answer(policy, rewards, {}, watched, loop.sampling, tokenizer, runtime.microbatch_tokens)
        return found, kl_per_answer(policy, reference, found.rollout, runtime.microbatch_tokens)

    development = Development(sample, optimizer.parameters, tokenizer.end_id, cfg, stage.tracker.log_metrics)
    recovery = recovery_of(stage).hold(development=development, rewards=rewards)
    with stage.progress(cfg.iterations) as bar:

        def log(step: int, stats: dict[str, float], experience: Experience) -> None:
            stage.log(step, stats | rewards.means())
            stage.tracker.log_metrics(step, rewards.seconds)
            if step == 0:
                tell(cfg.discount_notes(float(experience.response_lengths_B.float().median())))
            shown = {"score": "score_mean", "KL": "kl_per_sequence_k1", "length": "length_mean", "loss": "loss"}
            bar.advance(step, **{label: stats.get(name, math.nan) for label, name in shown.items()})
            if step % runtime.samples_every == 0 or step + 1 == cfg.iterations:
                stage.tracker.log_table(
                    f"samples/step_{step:04d}", sample_rows(experience, tokenizer, rewards.values)[:16]
                )

        loop.train(cfg, asked, optimizer, log, development, recovery)
    assert frozen == {name: policy.backbone.adapter_hash(name) for name in frozen}, "a frozen adapter has moved"
    development.restore_kept()
    development.write()
    policy.backbone.save_adapter("policy", FOLDER)
    if policy.value_head is not None:
        save_head(policy.value_head, FOLDER)
    first, last = ({key: row[key] for key in WATCHED if key in row} for row in (stage.curves[0], stage.curves[-1]))
    stage.finish({"prompts": len(questions), **development.summary(), "first": first, "last": last})


if __name__ == "__main__":
    run_stage("ppo", ppo)
