"""Stage ppo: the policy, a copy of sft, is moved toward higher scores at a price per nat of KL to the frozen sft."""

from pathlib import Path

from pipeline.algorithms import ppo as ppo_algorithm
from pipeline.batch import Experience
from pipeline.data.examples import prompt_batches, prompts
from pipeline.data.prepared import read_pairs
from pipeline.errors import TrainingError
from pipeline.heads import ScalarHead
from pipeline.online import train_online
from pipeline.opening import open_base
from pipeline.params.ppo import PPOParams
from pipeline.roles import Policy, RewardModel
from pipeline.rollout import Sampling
from pipeline.samples import sample_rows
from pipeline.stage import Stage, run_stage
from pipeline.update import Optimizer, ParameterGroup, constant_after_warmup
from pipeline.weights import load_head, save_head


def ppo(stage: Stage) -> None:
    """Writes artifacts/policy, metrics/ppo.json, plots/ppo.tsv."""
    cfg, runtime = stage.params(PPOParams), stage.runtime
    questions = prompts(read_pairs(stage.input("prepared/ppo.jsonl")), stage.tokenizer)
    if len(questions) < cfg.rollout_size:
        raise TrainingError(
            f"ppo.rollout_size is {cfg.rollout_size} but the part ppo has {len(questions)} prompts, fewer than one batch; "
            f"lower ppo.rollout_size to at most {len(questions)}, or raise data.split.ppo."
        )
    backbone = open_base(stage)
    backbone.load_adapter("sft", stage.input("artifacts/sft"))
    backbone.load_adapter("policy", Path("artifacts/sft"))  # the policy starts as a copy of sft, so KL is 0 at step 0
    backbone.load_adapter("reward", stage.input("artifacts/reward"))
    frozen = {name: backbone.adapter_hash(name) for name in ("sft", "reward")}
    value_head = ScalarHead(backbone.hidden_size, std=0.0).to(backbone.device)
    policy = Policy(backbone, "policy", cfg.temperature, runtime.logprob_chunk, value_head)
    reference = Policy(backbone, "sft", cfg.temperature, runtime.logprob_chunk)
    reward_model = RewardModel(
        backbone, "reward", load_head(Path("artifacts/reward"), backbone.hidden_size, backbone.device)
    )
    optimizer = Optimizer(
        [
            ParameterGroup("policy", backbone.train("policy"), cfg.lr),
            ParameterGroup("value", list(value_head.parameters()), cfg.value_lr),
        ],
        cfg.max_grad_norm,
        constant_after_warmup(cfg.warmup_steps),
    )
    sampling = Sampling(stage.tokenizer.max_response, stage.tokenizer.stop_ids, runtime.rollout_chunk, stage.seed)
    with stage.progress(cfg.iterations) as bar:

        def log(step: int, stats: dict[str, float], experience: Experience) -> None:
            stage.log(step, stats)
            bar.advance(
                step,
                score=stats["score_mean"],
                KL=stats["kl_per_sequence_k1"],
                length=stats["length_mean"],
                loss=stats["loss"],
            )
            if step % runtime.samples_every == 0 or step + 1 == cfg.iterations:
                stage.tracker.log_table(f"samples/step_{step:04d}", sample_rows(experience, stage.tokenizer)[:16])

        train_online(
            policy,
            reference,
            lambda rollout: reward_model.score(rollout.ended(stage.tokenizer.end_id)),
            prompt_batches(questions, cfg.rollout_size, cfg.iterations, stage.seed),
            optimizer,
            ppo_algorithm(cfg),
            cfg,
            sampling,
            runtime.microbatch_size,
            log,
        )
    assert frozen == {name: backbone.adapter_hash(name) for name in frozen}, "a frozen adapter has moved"
    backbone.save_adapter("policy", Path("artifacts/policy"))
    save_head(value_head, Path("artifacts/policy"))
    first, last = stage.curves[0], stage.curves[-1]
    watched = ("score_mean", "kl_per_sequence_k1", "length_mean", "end_token_rate", "entropy", "explained_variance")
    stage.finish(
        {"prompts": len(questions), "first": {k: first[k] for k in watched}, "last": {k: last[k] for k in watched}}
    )


if __name__ == "__main__":
    run_stage("ppo", ppo)
