"""Stage prepare: raw pairs -> checked, divided by prompt, counted; and the base's fingerprint.

Everything here happens before any weight is loaded, so that faults in parameters or data show within seconds.
"""

import json
from pathlib import Path

from pipeline.base_model import fingerprint, public_name
from pipeline.data.intake import read_all, report_rejects
from pipeline.data.prepared import write_pairs
from pipeline.data.records import prompt_key
from pipeline.data.splitting import PARTS, split_pairs
from pipeline.files import write_json
from pipeline.params.base import BaseParams
from pipeline.params.check import check_params
from pipeline.params.data import DataParams
from pipeline.progress import console
from pipeline.stage import BASE_FILE, Stage, run_stage


def prepare(stage: Stage) -> None:
    """Writes prepared/ and metrics/prepare.json."""
    for warning in check_params():
        console.print(f"note: {warning}", markup=False, style="yellow")
    cfg = stage.params(DataParams, "data")
    intake = read_all(cfg.pairs)
    report_rejects(intake, cfg.pairs, cfg.max_bad_share)
    unique = list(dict.fromkeys(intake.pairs))
    parts = split_pairs(unique, cfg.split, cfg.max_prompts)

    folder = BASE_FILE.parent
    folder.mkdir(exist_ok=True)
    for part in PARTS:
        write_pairs(folder / f"{part}.jsonl", parts[part])
    rejects = [json.dumps(row, ensure_ascii=False) + "\n" for row in intake.reject_rows()]
    Path(folder / "rejects.jsonl").write_text("".join(rejects), encoding="utf-8")
    name, revision = public_name(stage.params(BaseParams, "base").model)
    write_json(BASE_FILE, {"name": name, "revision": revision, "fingerprint": fingerprint(stage.base_folder)})

    prompts = {part: {prompt_key(pair.prompt) for pair in parts[part]} for part in PARTS}
    tokenizer = stage.tokenizer
    used = [pair for part in PARTS for pair in parts[part]]
    stage.finish(
        {
            "rows": intake.rows,
            "rows_used": len(used),
            "rejected": intake.rejects_by_kind(),
            "duplicates": len(intake.pairs) - len(unique),
            "shapes": intake.shapes,
            "prompts": {part: len(keys) for part, keys in prompts.items()},
            "pairs": {part: len(parts[part]) for part in PARTS},
            "prompts_in_two_parts": sum(map(len, prompts.values())) - len(set().union(*prompts.values())),
            "prompts_cut": sum(tokenizer.is_cut(pair.prompt) for pair in used),
            "chosen_longer_share": sum(len(pair.chosen) > len(pair.rejected) for pair in used) / len(used),
        }
    )
    sizes = ", ".join(f"{part} {len(keys)}" for part, keys in prompts.items())
    console.print(f"prepare: {len(intake.pairs)} of {intake.rows} rows can be used; prompts: {sizes}", markup=False)


if __name__ == "__main__":
    run_stage("prepare", prepare)
