"""Stage prepare: raw rows -> checked, divided by prompt, counted, reported; and the base's fingerprint.

Everything here happens before any weight is loaded, so that faults in parameters or data show within seconds.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

from pipeline.base_model import fingerprint, public_name
from pipeline.data.acceptance import refuse_conversations
from pipeline.data.figures import Sample, pick_samples, row_tokens, sample_of, token_figures
from pipeline.data.intake import take_in_all
from pipeline.data.labels import label_figures, longer
from pipeline.data.parts import for_part
from pipeline.data.pool import Pool
from pipeline.data.prepared import write_records
from pipeline.data.records import Pair, Record
from pipeline.data.report import data_report
from pipeline.data.splitting import PARTS, Division, divide
from pipeline.files import write_json
from pipeline.params.base import BaseParams
from pipeline.params.check import check_params
from pipeline.params.data import DataParams
from pipeline.progress import console, tell
from pipeline.stage import BASE_FILE, Stage, run_stage

FOLDER = BASE_FILE.parent
REPORT = Path("reports/data.md")


def prepare(stage: Stage) -> None:
    """Writes prepared/, metrics/prepare.json and reports/data.md."""
    cfg, tokenizer = stage.params(DataParams, "data"), stage.tokenizer
    tell((*check_params(), *tokenizer.notes))
    FOLDER.mkdir(exist_ok=True)
    with TemporaryFile(dir=FOLDER) as spill:  # beside the outputs: a small /tmp may not hold it
        pool = Pool(spill)
        with (FOLDER / "rejects.jsonl").open("w", encoding="utf-8") as rejects:
            tallies = take_in_all(cfg, refuse_conversations(tokenizer, pool.add), rejects)
        made_of = dict.fromkeys(PARTS, "pairs")
        made_of |= {part: kind for part, kind in (("sft", "demonstrations"), ("ppo", "prompts")) if kind in tallies}
        division = divide(pool.index(), made_of, cfg.split, cfg.max_prompts)
        assert division.prompts_in_two_parts == 0, "a prompt is in two parts"
        lines = {
            part: write_records(FOLDER / f"{part}.jsonl", for_part(part, pool.read(numbers_N)))
            for part, numbers_N in division.parts.items()
        }
        metrics = {
            "sources": {kind: tally.figures() for kind, tally in tallies.items()},
            "duplicates": division.duplicates,
            "left_out": division.left_out,
            "prompts": division.prompts,
            "prompts_in_two_parts": division.prompts_in_two_parts,
            "lines": lines,
            "tokens": token_figures(row_tokens(row, tokenizer) for row in samples_of(division, pool)),
            "labels": label_figures(
                Counter(longer(record) for record in used(division, pool) if isinstance(record, Pair))
            ),
        }
        report = data_report(metrics, pick_samples(samples_of(division, pool)), tokenizer)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(report, encoding="utf-8")
    stage.tracker.log_file(REPORT)
    name, revision = public_name(stage.params(BaseParams, "base").model)
    write_json(BASE_FILE, {"name": name, "revision": revision, "fingerprint": fingerprint(stage.base_folder)})
    stage.finish(metrics)
    sizes = ", ".join(f"{part} {count}" for part, count in division.prompts.items())
    console.print(f"prepare: prompts: {sizes}; {REPORT} shows them as the model will see them", markup=False)


def used(division: Division, pool: Pool) -> Iterator[Record]:
    """The records of all parts as they came."""
    for numbers_N in division.parts.values():
        yield from pool.read(numbers_N)


def samples_of(division: Division, pool: Pool) -> Iterator[Sample]:
    """The records of all parts as the stages will read them."""
    for part, numbers_N in division.parts.items():
        yield from (sample_of(part, record) for record in for_part(part, pool.read(numbers_N)))


if __name__ == "__main__":
    run_stage("prepare", prepare)
