"""Stage evaluate: base, SFT and policy answer the held-out prompts; who wins, at what KL, and at what length.

The judge shares backbone and data style with the reward model, so it is not independent evidence.
"""

from pathlib import Path

from pipeline.candidate import stand
from pipeline.development import ANSWERS, over_optimisation, read_watched
from pipeline.files import write_tsv
from pipeline.held_out import compare_answers, open_held_out, scorers_accuracy
from pipeline.stage import Stage, run_stage


def evaluate(stage: Stage) -> None:
    """Writes metrics/evaluate.json, plots/evaluate.tsv, plots/overoptimisation.tsv, artifacts/evaluation."""
    held_out = open_held_out(stage, "policy")
    metrics = compare_answers(stage, held_out, Path("artifacts/evaluation")) | scorers_accuracy(stage, held_out)
    curve = over_optimisation(
        read_watched(stage.input(str(ANSWERS))),
        held_out.scorers["judge"],
        stage.runtime.microbatch_tokens,
        held_out.cfg.bootstrap,
        stage.seed,
    )
    write_tsv(Path("plots/overoptimisation.tsv"), curve)
    stage.finish(metrics)
    stand(stage, metrics, "policy", held_out.cfg.temperature, held_out.cfg.bootstrap)


if __name__ == "__main__":
    run_stage("evaluate", evaluate)
