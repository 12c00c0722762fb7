"""Stage prepare: raw rows -> checked, divided by prompt, counted, reported; and the base's fingerprint.

Everything here happens before any weight is loaded, so that faults in parameters or data show within seconds.
"""

from pathlib import Path
from tempfile import TemporaryFile

from pipeline.base_model import fingerprint, public_name
from pipeline.data.acceptance import refuse_conversations
from pipeline.data.enough import refuse_few_prompts, refuse_without_pairs
from pipeline.data.figures import Survey, check_equal_after_cut
from pipeline.data.intake import take_in_all
from pipeline.data.labels import label_figures
from pipeline.data.parts import for_part
from pipeline.data.pool import Pool
from pipeline.data.prepared import write_records
from pipeline.data.report import data_report
from pipeline.data.splitting import PARTS, divide
from pipeline.files import write_json
from pipeline.params.base import BaseParams
from pipeline.params.check import check_params
from pipeline.params.data import DataParams
from pipeline.params.ppo import PPOParams
from pipeline.params.reward import RewardParams
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
        survey = Survey(tokenizer)
        lines = {}
        for part, numbers_N in division.parts.items():
            records = for_part(part, survey.of_raw(pool.read(numbers_N)))
            lines[part] = write_records(FOLDER / f"{part}.jsonl", survey.of_part(part, records))
    check_equal_after_cut(survey.tokens, tokenizer.max_response, cfg.max_bad_share)
    cut_pairs = {name: stage.params(RewardParams, name).cut_pairs for name in ("reward", "judge")}
    refuse_without_pairs(survey.pairs, cut_pairs, tokenizer.max_response)
    refuse_few_prompts(stage.params(PPOParams, "ppo"), division.prompts["ppo"])
    metrics = {
        "sources": {kind: tally.figures() for kind, tally in tallies.items()},
        "duplicates": division.duplicates,
        "left_out": division.left_out,
        "prompts": division.prompts,
        "prompts_in_two_parts": division.prompts_in_two_parts,
        "lines": lines,
        "tokens": survey.tokens.figures(),
        "labels": label_figures(survey.signs),
    }
    report = data_report(metrics, survey.picked.samples(), tokenizer)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(report, encoding="utf-8")
    stage.tracker.log_file(REPORT)
    name, revision = public_name(stage.params(BaseParams, "base").model)
    write_json(BASE_FILE, {"name": name, "revision": revision, "fingerprint": fingerprint(stage.base_folder)})
    stage.finish(metrics)
    sizes = ", ".join(f"{part} {count}" for part, count in division.prompts.items())
    console.print(f"prepare: prompts: {sizes}; {REPORT} shows them as the model will see them", markup=False)


if __name__ == "__main__":
    run_stage("prepare", prepare)
