"""A million rows through the stage prepare, in a folder of its own: seconds and peak memory.

    python -m benchmarks.prepare_million             # 1,000,000 rows, about 1 GB of JSONL
    python -m benchmarks.prepare_million 20000

The base is the tiny model, so the figures are those of reading, dividing, writing, and making ids of every prompt.
"""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
WORDS = [f"word{number}" for number in range(5000)]


def write_rows(file: Path, count: int) -> None:
    """Preference pairs of about 1,000 bytes; every tenth prompt repeats an earlier one, every thousandth row is faulty."""
    rng = random.Random(0)
    with file.open("w", encoding="utf-8") as stream:
        for number in range(count):
            question = number - number % 10 // 9
            prompt = f"Question {question}: {' '.join(random.Random(question).choices(WORDS, k=20))}"
            chosen, rejected = (" ".join(rng.choices(WORDS, k=45)) for _ in range(2))
            row = {"prompt": prompt, "chosen": chosen, "rejected": None if number % 1000 == 999 else rejected}
            stream.write(json.dumps(row) + "\n")


def main() -> None:
    """Argument: the number of rows."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    (ROOT / ".work").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / ".work") as name:  # /tmp may be too small, or memory itself
        folder = Path(name)
        write_rows(folder / "rows.jsonl", count)
        yaml = YAML()
        params = yaml.load(ROOT / "recipes" / "smoke.yaml")
        params["data"] |= {"pairs": "rows.jsonl", "max_bad_share": 0.01, "max_prompts": None}
        params["data"] |= {"demonstrations": "data/from-pairs", "prompts": "data/from-pairs"}
        yaml.dump(params, folder / "params.yaml")
        (folder / "alternatives").mkdir()
        for file in ("dvc.yaml", "alternatives/dvc.yaml"):  # a stage reads both to know what its inputs are
            shutil.copy2(ROOT / file, folder / file)
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "stages.prepare"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=True,
        )
        seconds = time.monotonic() - started
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024**2
        size = (folder / "rows.jsonl").stat().st_size / 1e9
    print(f"{count:,} rows, {size:.2f} GB: {seconds:.0f} s, peak resident memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
