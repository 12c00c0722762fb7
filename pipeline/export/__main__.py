"""`make export`: exports/policy-adapter, exports/policy and exports/reward, each checked before it is put in its place."""

import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipeline.backbone import Backbone, BaseIdentity
from pipeline.data.examples import Prompt, prompts
from pipeline.data.prepared import read_pairs
from pipeline.diagnosis.opening import untracked
from pipeline.errors import ParameterError, StorageError, UserError
from pipeline.export.agreement import Agreement, Said, agreement, greedy_answers, response_states
from pipeline.export.cards import facts, policy_card, reward_card
from pipeline.export.folders import begin, publish
from pipeline.export.merge import classifier, language_model, merged_weights, size_of
from pipeline.export.scoring import ScoreAgreement, Texts, plain_scores, score_agreement, whole_texts
from pipeline.export.serving import generation_config, padding_beside, policy_tokenizer, reward_tokenizer
from pipeline.files import megabytes, storage, write_text
from pipeline.loading import pick_device
from pipeline.opening import open_base
from pipeline.params.evaluate import EvaluateParams
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section, parse_seed, read_params
from pipeline.progress import console
from pipeline.randomness import prepare_torch
from pipeline.roles import Policy, RewardModel
from pipeline.rollout import Sampling, sampling_of
from pipeline.scorers import open_reward_model
from pipeline.stage import BASE_FILE, Stage, quiet_libraries

FOLDER, CARD = Path("exports"), "README.md"
ADAPTER, POLICY, REWARD = FOLDER / "policy-adapter", FOLDER / "policy", FOLDER / "reward"
PROMPTS, TEXTS = 32, 64  # so many answers and scores are compared
MEASURED_BY = {"policy": "evaluate", "dpo": "evaluate_dpo"}
"""What can be exported, and the stage that says how good it is."""


@dataclass(frozen=True)
class Original:
    """What the trained models say, which their exports are to say again.

    scores_B: None where the reward model is one that the person brought: there is nothing to take away.
    """

    questions: list[Prompt]
    said: Said
    texts: Texts
    scores_B: Tensor | None
    identity: BaseIdentity
    dtype: torch.dtype


def export(stage: Stage, adapter: str) -> None:
    """Writes exports/.

    Raises:
        DataError: a stage before this has not run.
        BaseModelError: an artifact does not fit the base, or what was merged is not what was trained; exports/ is as it was.
        StorageError: there is no room.
    """
    evaluation = json.loads(stage.input(f"metrics/{stage.name}.json").read_text(encoding="utf-8"))
    base = json.loads(stage.input(str(BASE_FILE)).read_text(encoding="utf-8"))
    partial = {folder: begin(folder) for folder in (ADAPTER, POLICY, REWARD)}
    try:
        check_and_publish(stage, adapter, evaluation, base, partial)
    finally:  # what was refused is not left behind
        for folder in partial.values():
            shutil.rmtree(folder, ignore_errors=True)


def check_and_publish(
    stage: Stage, adapter: str, evaluation: dict[str, Any], base: dict[str, Any], partial: dict[Path, Path]
) -> None:
    """Nothing takes its place in exports/ before all of it has been compared with the originals."""
    original = write(stage, adapter, partial)
    said = check_policy(stage, original, partial[POLICY])
    console.print(f"export: policy: {said}", markup=False)
    said.check()
    shared = facts(base, read_params(), policy_tokenizer(stage.tokenizer))
    cards = {
        ADAPTER: policy_card(shared, adapter, evaluation, None),
        POLICY: policy_card(shared, adapter, evaluation, str(said)),
    }
    if original.scores_B is not None:
        scored = check_reward(stage, original, partial[REWARD])
        console.print(f"export: reward model: {scored}", markup=False)
        scored.check()
        cards[REWARD] = reward_card(shared, evaluation, str(scored))
    for folder, card in cards.items():
        write_text(partial[folder] / CARD, card)
        publish(partial[folder], folder)
        size = sum(file.stat().st_size for file in folder.iterdir())
        console.print(f"export: {folder}, {megabytes(size)}; its {CARD} says how to load it", markup=False)


def write(stage: Stage, adapter: str, partial: dict[Path, Path]) -> Original:
    """Everything but the cards, and what the originals say. The base is out of memory when this returns."""
    chat, runtime = stage.tokenizer, stage.runtime
    pairs = read_pairs(stage.input("prepared/heldout.jsonl"))
    questions, texts = prompts(pairs, chat)[:PROMPTS], whole_texts(pairs, chat, TEXTS)
    backbone = open_base(stage)
    backbone.load_adapter(adapter, stage.input(f"artifacts/{adapter}"))
    reward = open_reward_model(stage, backbone, "reward")
    said = greedy_answers(
        Policy(backbone, adapter, 1.0, runtime.logprob_chunk), questions, greedy(stage), runtime.microbatch_tokens
    )

    tokenizer, scoring = policy_tokenizer(chat), reward_tokenizer(chat)
    backbone.save_adapter(adapter, partial[ADAPTER])
    tokenizer.save_pretrained(partial[ADAPTER])
    model = language_model(stage.base_folder, merged_weights(backbone, adapter))
    temperature = stage.params(EvaluateParams, "evaluate").temperature
    model.generation_config = generation_config(chat, temperature, tokenizer.pad_token_id)
    save(model, tokenizer, partial[POLICY])
    del model  # two merged models are not held at once
    scores_B = None
    if isinstance(reward, RewardModel):
        scores_B = reward.score_all(texts.rows, runtime.microbatch_tokens)
        merged = classifier(stage.base_folder, merged_weights(backbone, "reward"), reward.head, padding_beside(chat))
        save(merged, scoring, partial[REWARD])
    return Original(questions, said, texts, scores_B, backbone.identity, backbone.head_VH.dtype)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """A folder that plain transformers loads.

    Raises:
        StorageError: there is no room, or the folder cannot be written to.
    """
    with storage(folder, size_of(model)):
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:  # a full disk, in its words
            raise StorageError(f"{folder} cannot be written: {error}.") from error
        tokenizer.save_pretrained(folder)


def check_policy(stage: Stage, original: Original, folder: Path) -> Agreement:
    """The merged model, loaded as anyone would, answers the same questions."""
    runtime, device = stage.runtime, pick_device(stage.runtime)
    causal = AutoModelForCausalLM.from_pretrained(  # nosec B615  # a local folder
        folder, dtype="auto", device_map={"": device}, use_safetensors=True
    )
    merged = Policy(Backbone(causal, device, original.identity), None, 1.0, runtime.logprob_chunk)
    again = greedy_answers(merged, original.questions, greedy(stage), runtime.microbatch_tokens)
    states_NH = response_states(merged, original.said.answers, runtime.microbatch_tokens)
    return agreement(original.said, again, states_NH, merged.backbone.head_VH, runtime.logprob_chunk)


def check_reward(stage: Stage, original: Original, folder: Path) -> ScoreAgreement:
    """The exported reward model, loaded as anyone would, scores the same texts."""
    model = AutoModelForSequenceClassification.from_pretrained(  # nosec B615  # a local folder
        folder, dtype="auto", device_map={"": pick_device(stage.runtime)}, use_safetensors=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)  # nosec B615  # a local folder
    exported_B = plain_scores(model.eval(), tokenizer, original.texts.conversations)
    return score_agreement(original.scores_B, exported_B, original.dtype)


def greedy(stage: Stage) -> Sampling:
    """The likeliest answers, for comparing."""
    return replace(sampling_of(stage.tokenizer, stage.runtime, stage.seed), greedy=True)


def main(adapter: str = "policy") -> None:
    """`adapter`: policy, of stage ppo, or dpo."""
    quiet_libraries()
    try:
        if adapter not in MEASURED_BY:
            raise ParameterError(
                f"POLICY is {adapter!r} but must be {' or '.join(MEASURED_BY)}; for example make export POLICY=dpo."
            )
        runtime, seed = load_section("runtime", RuntimeParams), parse_seed(read_params())
        prepare_torch(seed, runtime)
        export(untracked(MEASURED_BY[adapter], seed, runtime), adapter)
    except UserError as error:
        console.print(f"export: {error}", markup=False, style="red")
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
