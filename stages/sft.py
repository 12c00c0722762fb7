"""Stage sft: a LoRA adapter on the frozen base, trained on the chosen answers, or `sft.from`; the reference ever after."""

from dataclasses import replace
from pathlib import Path

from pipeline.batch import Sequences
from pipeline.data.examples import demonstrations, epochs_of, steps_in
from pipeline.data.prepared import read_demonstrations, read_pairs
from pipeline.imported import import_sft
from pipeline.objectives.offline import sft as sft_objective
from pipeline.offline import train_offline
from pipeline.opening import open_base
from pipeline.params.base import LoraParams
from pipeline.params.sft import SFTParams
from pipeline.recovery import recovery_of
from pipeline.roles import Policy
from pipeline.stage import Stage, run_stage
from pipeline.update import Optimizer, ParameterGroup, cosine_to_tenth


def sft(stage: Stage) -> None:
    """Writes artifacts/sft, metrics/sft.json, plots/sft.tsv."""
    cfg = stage.params(SFTParams)
    rows, counts = demonstrations(read_demonstrations(stage.input("prepared/sft.jsonl")), stage.tokenizer)
    watched, _ = demonstrations(read_pairs(stage.input("prepared/development.jsonl")), stage.tokenizer)
    backbone = open_base(stage)
    if cfg.from_ is None:
        backbone.add_adapter("sft", stage.params(LoraParams, "lora"))
    else:
        import_sft(backbone, cfg.from_)
    model = Policy(backbone, "sft", temperature=1.0, logprob_chunk=stage.runtime.logprob_chunk)
    untrained = model if cfg.from_ is None else replace(model, adapter=None)
    before = loss_on(untrained, watched, stage.runtime.microbatch_tokens)
    steps = train(stage, cfg, model, rows) if cfg.from_ is None else 0
    after = loss_on(model, watched, stage.runtime.microbatch_tokens)
    if not steps:
        stage.log(0, {"loss": after})  # the curve of what was not trained here: one point, on the development pairs
    backbone.save_adapter("sft", Path("artifacts/sft"))
    stage.finish({"development_loss": after, "development_loss_before": before, "steps": steps, "data": counts})


def train(stage: Stage, cfg: SFTParams, model: Policy, rows: Sequences) -> int:
    """Moves the adapter; the number of steps."""
    steps = steps_in(rows, cfg.batch_size, cfg.epochs)
    optimizer = Optimizer(
        [ParameterGroup("adapter", model.backbone.train("sft"), cfg.lr)],
        cfg.max_grad_norm,
        cosine_to_tenth(steps, cfg.warmup_share),
    )
    work = f"{len(rows)} rows in {steps} steps of {cfg.batch_size}, {rows.num_terms:,} tokens learnt from per epoch"
    stage.tell_trained(optimizer.sizes, model.backbone.adapters, work)
    with stage.progress(steps) as bar:

        def log(step: int, stats: dict[str, float]) -> None:
            stage.log(step, stats)
            bar.advance(step, loss=stats["loss"])

        train_offline(
            model,
            epochs_of(rows, cfg.batch_size, cfg.epochs, stage.seed),
            optimizer,
            lambda output, batch: sft_objective(output.logprobs_BR, batch.response_mask_BR),
            stage.runtime.microbatch_tokens,
            dropout=True,
            log=log,
            recovery=recovery_of(stage),
        )
    return steps


def loss_on(model: Policy, rows: Sequences, microbatch_tokens: int) -> float:
    """Negative log-likelihood per response token."""
    return -float(model.logprobs_all(rows, microbatch_tokens).sum()) / rows.num_terms


if __name__ == "__main__":
    run_stage("sft", sft)
