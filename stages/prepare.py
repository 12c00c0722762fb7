"""Stage prepare: raw rows -> checked, divided by prompt, counted; and the base's fingerprint.

Everything here happens before any weight is loaded, so that faults in parameters or data show within seconds.
"""

from collections import Counter
from collections.abc import Iterator
from tempfile import TemporaryFile

from pipeline.base_model import fingerprint, public_name
from pipeline.data.intake import take_in_all
from pipeline.data.parts import for_part
from pipeline.data.pool import Pool
from pipeline.data.prepared import write_records
from pipeline.data.records import Pair, Record
from pipeline.data.splitting import PARTS, Division, divide
from pipeline.data.tokenization import ChatTokenizer
from pipeline.files import write_json
from pipeline.params.base import BaseParams
from pipeline.params.check import check_params
from pipeline.params.data import DataParams
from pipeline.progress import console
from pipeline.stage import BASE_FILE, Stage, run_stage

FOLDER = BASE_FILE.parent


def prepare(stage: Stage) -> None:
    """Writes prepared/ and metrics/prepare.json."""
    for warning in check_params():
        console.print(f"note: {warning}", markup=False, style="yellow")
    cfg, tokenizer = stage.params(DataParams, "data"), stage.tokenizer
    FOLDER.mkdir(exist_ok=True)
    with TemporaryFile(dir=FOLDER) as spill:  # beside the outputs: a small /tmp may not hold it
        pool = Pool(spill)
        with (FOLDER / "rejects.jsonl").open("w", encoding="utf-8") as rejects:
            tallies = take_in_all(cfg, pool.add, rejects)
        made_of = dict.fromkeys(PARTS, "pairs")
        made_of |= {part: kind for part, kind in (("sft", "demonstrations"), ("ppo", "prompts")) if kind in tallies}
        division = divide(pool.index(), made_of, cfg.split, cfg.max_prompts)
        assert division.prompts_in_two_parts == 0, "a prompt is in two parts"
        counts = write(division, pool, tokenizer)
    name, revision = public_name(stage.params(BaseParams, "base").model)
    write_json(BASE_FILE, {"name": name, "revision": revision, "fingerprint": fingerprint(stage.base_folder)})
    stage.finish(
        {
            "sources": {kind: tally.figures() for kind, tally in tallies.items()},
            "duplicates": division.duplicates,
            "left_out": division.left_out,
            "prompts": division.prompts,
            "prompts_in_two_parts": division.prompts_in_two_parts,
            "lines": {part: counts[f"lines_{part}"] for part in PARTS},
            "prompts_cut": counts["prompts_cut"],
            "chosen_longer_share": counts["chosen_longer"] / counts["pairs"],
        }
    )
    sizes = ", ".join(f"{part} {count}" for part, count in division.prompts.items())
    console.print(f"prepare: prompts: {sizes}", markup=False)


def write(division: Division, pool: Pool, tokenizer: ChatTokenizer) -> Counter[str]:
    """The parts, each into its file; counts of what they hold."""
    counts: Counter[str] = Counter()

    def counted(records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            counts["prompts_cut"] += tokenizer.is_cut(record.prompt)
            if isinstance(record, Pair):
                counts["pairs"] += 1
                counts["chosen_longer"] += len(record.chosen) > len(record.rejected)
            yield record

    for part, numbers_N in division.parts.items():
        records = for_part(part, counted(pool.read(numbers_N)))
        counts[f"lines_{part}"] = write_records(FOLDER / f"{part}.jsonl", records)
    return counts


if __name__ == "__main__":
    run_stage("prepare", prepare)
