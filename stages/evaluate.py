"""Stage evaluate: base, SFT and policy answer the held-out prompts; who wins, at what KL, and at what length.

The judge shares backbone and data style with the reward model, so it is not independent evidence.
"""

from pathlib import Path

from pipeline.development import ANSWERS, over_optimisation, read_watched
from pipeline.files import write_tsv
from pipeline.held_out import compare_answers, load_scorers, scorers_accuracy
from pipeline.opening import open_base
from pipeline.params.evaluate import EvaluateParams
from pipeline.stage import Stage, run_stage


def evaluate(stage: Stage) -> None:
    """Writes metrics/evaluate.json, plots/evaluate.tsv, plots/overoptimisation.tsv, artifacts/evaluation."""
    cfg = stage.params(EvaluateParams)
    backbone = open_base(stage)
    scorers = load_scorers(stage, backbone)
    metrics = compare_answers(stage, cfg, backbone, scorers, "policy", Path("artifacts/evaluation"))
    metrics |= scorers_accuracy(stage, cfg, scorers)
    watched = read_watched(stage.input(str(ANSWERS)))
    curve = over_optimisation(watched, scorers["judge"], stage.runtime.microbatch_size, cfg.bootstrap, stage.seed)
    write_tsv(Path("plots/overoptimisation.tsv"), curve)
    stage.finish(metrics)


if __name__ == "__main__":
    run_stage("evaluate", evaluate)
