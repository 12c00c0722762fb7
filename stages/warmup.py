"""Stage warmup: CartPole by REINFORCE and by PPO, with the functions that RLHF is trained by."""

import time
from statistics import fmean

import torch

from pipeline.cartpole import greedy, returns, sampled
from pipeline.params.warmup import WarmupParams
from pipeline.progress import ProgressBar, console
from pipeline.randomness import derive_seed
from pipeline.stage import Stage, run_stage
from pipeline.warmup import METHODS, train


def warmup(stage: Stage) -> None:
    """Writes metrics/warmup.json, plots/warmup.tsv."""
    cfg = stage.params(WarmupParams)
    torch.set_num_threads(1)  # there is nothing in networks of this size for a second thread
    metrics, curves = {}, {}
    for name in METHODS:
        started = time.monotonic()
        runs = [run(stage, cfg, name, seed) for seed in cfg.seeds]
        console.print(f"{name}: {len(cfg.seeds)} seeds in {time.monotonic() - started:.0f} s", markup=False)
        metrics[name] = {f"seed_{seed}": learnt for seed, (learnt, _) in zip(cfg.seeds, runs, strict=True)}
        for seed, (_, curve) in zip(cfg.seeds, runs, strict=True):
            curves[f"{name}_seed_{seed}"] = curve
        curves[name] = [fmean(column) for column in zip(*(curve for _, curve in runs), strict=True)]
    for step in range(cfg.iterations):
        episodes = (step + 1) * cfg.episodes
        stage.log(step, {"episodes": episodes} | {name: curve[step] for name, curve in curves.items()})
    stage.finish(metrics)


def run(stage: Stage, cfg: WarmupParams, name: str, seed: int) -> tuple[dict[str, float], list[float]]:
    """Trains once; what the policy is paid in new episodes, and what it was paid in each iteration, on average."""
    curve: list[float] = []
    with ProgressBar(f"{name}, seed {seed}", cfg.iterations, stage.runtime.log_every) as bar:

        def log(step: int, stats: dict[str, float]) -> None:
            stage.tracker.log_metrics(step, {f"{name}/seed_{seed}/{key}": value for key, value in stats.items()})
            curve.append(stats["return_mean"])
            bar.advance(step, **{"return": stats["return_mean"], "loss": stats["loss"]})

        policy = train(METHODS[name](cfg), cfg, seed, log)
    unseen = derive_seed(seed, "evaluation")  # training has seeds of its own: derive_seed(seed, "training", step)
    as_trained = returns(policy, cfg.evaluation_episodes, unseen, sampled)
    likeliest = returns(policy, cfg.evaluation_episodes, unseen, greedy)
    learnt = {
        "sampled_mean": float(as_trained.mean()),
        "sampled_min": float(as_trained.min()),
        "greedy_mean": float(likeliest.mean()),
    }
    return learnt, curve


if __name__ == "__main__":
    run_stage("warmup", warmup)
