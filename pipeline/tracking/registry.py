"""Policies as versions of one registered model. All of it may be done twice and is then as if done once.

A version is found again by the hash of its weights. `candidate` is the newest version; `champion` goes to the one that beat the
champion before it under the judge, outside the interval, and stays where it is otherwise. A person may set either by hand.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pipeline.tracking.spool import Entry
from pipeline.tracking.standing import Standing, ruling

# MLflow is imported by store.py alone, which hands over its client, and gets its entities back
Client = Run = ModelVersion = Any
FOREIGN_TO_NAMES = re.compile(r"[^\w.-]")
FOLDER = "policy"  # of the weights, among the run's files
CANDIDATE, CHAMPION = "candidate", "champion"
HASH, COURT, SCORES, WHY = "policy.hash", "judge.court", "judge.scores", "champion.why"
ABOUT = "Policies of this pipeline: LoRA adapters in PEFT's format. candidate: the newest. champion: beat the champion before it under the judge."


def register(client: Client, run: Run, entry: Entry) -> str:
    """Makes or finds the version of an entry `register`, and says how it stands; the sentence for people."""
    name, ours = FOREIGN_TO_NAMES.sub("-", entry["model"]), Standing.of(entry["standing"])
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name, description=ABOUT)
    version = _version(client, name, run, ours)
    known = {str(version.version): version for version in client.search_model_versions(f"name = '{name}'")}
    aliases = _aliases(client, name)
    if str(version.version) == max(known, key=int):
        client.set_registered_model_alias(name, CANDIDATE, version.version)
    holder = known.get(aliases.get(CHAMPION, ""))
    if holder is not None and holder.version == version.version:
        return f"{name} version {version.version} is the champion"
    tags: Mapping[str, Any] = holder.tags if holder else {}
    decided = ruling(
        ours,
        tags.get(COURT, "") if holder else None,
        tuple(json.loads(tags.get(SCORES, "[]"))),
        f"version {holder.version}" if holder else "",
        entry["resamples"],
        entry["seed"],
    )
    client.set_model_version_tag(name, version.version, WHY, decided.why)
    if decided.champion:
        client.set_registered_model_alias(name, CHAMPION, version.version)
    standing = CHAMPION if decided.champion else CANDIDATE
    return f"{name} version {version.version} is registered as {standing}: {decided.why}"


def _version(client: Client, name: str, run: Run, ours: Standing) -> ModelVersion:
    figures = {f"figure.{key}": f"{value:.6g}" for key, value in ours.figures.items()}
    tags = {HASH: ours.policy, COURT: ours.court, SCORES: json.dumps([float(f"{score:.6g}") for score in ours.scores])}
    found = client.search_model_versions(f"name = '{name}' and tags.`{HASH}` = '{ours.policy}'")
    if not found:
        text = ", ".join(f"{key} {value:.3g}" for key, value in ours.figures.items())
        source = f"{run.info.artifact_uri}/{FOLDER}"
        return client.create_model_version(name, source, run.info.run_id, tags=tags | figures, description=text)
    for key, value in (tags | figures).items():
        client.set_model_version_tag(name, found[0].version, key, value)
    return found[0]


def _aliases(client: Client, name: str) -> dict[str, str]:
    return {alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()}
