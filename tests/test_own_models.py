"""`sft.from`, `reward.from`, `judge.from`: what plain PEFT and plain transformers saved, and what does not fit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chat_styles import LLAMA3
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from taking import assistant, pair, user
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from pipeline.backbone import Backbone
from pipeline.base_model import locate_own
from pipeline.batch import Sequences
from pipeline.classifier import Classifier, load_classifier, read_record, save_record
from pipeline.data.examples import prompts, sequences
from pipeline.data.templates import as_dicts
from pipeline.data.tokenization import ChatTokenizer
from pipeline.errors import BaseModelError, ParameterError
from pipeline.heads import ScalarHead
from pipeline.imported import import_reward_model, import_sft
from pipeline.params.reward import RewardParams
from pipeline.params.section import parse_section, read_params
from pipeline.tiny import tiny_model, tiny_tokenizer
from pipeline.weights import save_head

ROWS = sequences([([5, 6, 7], [8, 9, 2]), ([10, 11, 12, 13, 14, 15, 16, 17, 18], [19, 2])])
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PAIRS = [pair("What is tea?", "A drink.", "No idea, sorry."), pair("Why?", "So.", "Because it is so.")]


def peft_folder(model: PreTrainedModel, folder: Path, **settings) -> PreTrainedModel:
    """An adapter that moves things, saved by plain PEFT; the model with it."""
    torch.manual_seed(1)
    config = LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": LINEARS, "init_lora_weights": False} | settings))
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(folder)
    return adapted.eval()


def plain_logits(model: PreTrainedModel, rows: Sequences) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=rows.tokens_BT, attention_mask=rows.attention_mask_BT.long()).logits


def write_classifier(
    folder: Path, template: str | None = LLAMA3, pad: str | None = "<|endoftext|>", **overrides
) -> Path:
    """A tiny GPT-2 with a scalar head and another chat template than the base's, in a folder."""
    config = tiny_model("gpt2").config
    for key, value in ({"num_labels": 1, "pad_token_id": 0 if pad else None} | overrides).items():
        setattr(config, key, value)
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer(template)
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, ours: ChatTokenizer) -> Classifier:
    asked = prompts(PAIRS, ours)
    return load_classifier("reward.from", str(folder), folder, torch.float32, torch.device("cpu"), ours, asked)


# --- adapters ---


def test_an_sft_adapter_of_plain_peft(
    make_backbone: Callable[..., Backbone], tiny_folders: Callable, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folders(), dtype=torch.float32)
    plain = peft_folder(model, tmp_path, task_type="CAUSAL_LM")
    backbone = make_backbone(adapters=())
    import_sft(backbone, str(tmp_path))
    backbone.activate("sft")
    with backbone.inference():
        ours = backbone.hidden(ROWS.tokens_BT, ROWS.attention_mask_BT) @ backbone.head_VH.T
    mask_BT = ROWS.attention_mask_BT
    torch.testing.assert_close(ours[mask_BT], plain_logits(plain, ROWS)[mask_BT], rtol=1e-4, atol=1e-4)
    backbone.save_adapter("sft", tmp_path / "again")
    saved, original = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "again", tmp_path))
    assert saved.keys() == original.keys() and all(torch.equal(saved[key], original[key]) for key in saved)


def test_a_reward_adapter_of_plain_peft(
    make_backbone: Callable[..., Backbone], tiny_folders: Callable, tmp_path: Path
) -> None:
    """task_type SEQ_CLS: the head is in the adapter's file, as score.weight."""
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_folders(), num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = 0  # no row ends with it
    plain = peft_folder(model, tmp_path, task_type="SEQ_CLS")
    reward = import_reward_model(make_backbone(adapters=()), "reward", str(tmp_path))
    scores_B = reward.score_all(ROWS, 64)
    torch.testing.assert_close(scores_B, plain_logits(plain, ROWS)[:, 0], rtol=1e-4, atol=1e-4)
    assert float(scores_B.std()) > 1e-3


def test_a_reward_model_of_ours(make_backbone: Callable[..., Backbone], tmp_path: Path) -> None:
    backbone = make_backbone(adapters=("judge",))
    head = ScalarHead(backbone.hidden_size, std=0.1)
    backbone.save_adapter("judge", tmp_path)
    save_head(head, tmp_path)
    again = import_reward_model(make_backbone(adapters=()), "reward", str(tmp_path))
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(again.head.parameters(), head.parameters(), strict=True)
    )


def change_json(**changes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def of_another_base(folder: Path) -> None:
    (folder / "origin.json").write_text(json.dumps({"base_fingerprint": "0" * 64, "tokenizer_length": 259}))


def of_another_shape(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({key: torch.zeros(tensor.shape[0] + 1, tensor.shape[1]) for key, tensor in load_file(file).items()}, file)


def with_fewer_layers(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if "layers.0" in key}, file)


def with_a_head(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.score.weight": torch.zeros(1, 64)}, file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (of_another_base, "was trained on base 000000000000 but the present base is ffffffffffff"),
        (of_another_shape, "does not fit this base: shapes differ"),
        (with_fewer_layers, "does not fit this base: 14 tensors missing"),
        (with_a_head, "beside its adapter it has trained base_model.model.score.weight"),
        (change_json(use_dora=True), "which uses DoRA; adapters here are plain LoRA"),
        (change_json(bias="all"), "which uses trained biases of the base"),
        (change_json(peft_type="IA3"), "of PEFT's kind IA3; only LORA is known here"),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused(
    make_backbone: Callable[..., Backbone], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    make_backbone().save_adapter("sft", tmp_path)
    damage(tmp_path)
    with pytest.raises(BaseModelError, match=message):
        import_sft(make_backbone(adapters=()), str(tmp_path))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "beside its adapter it has nothing; a reward model needs head.safetensors or score.weight"),
        ({"score.weight": torch.zeros(2, 64)}, r"its head is \(2, 64\); for this base a scalar head is \(1, 64\)"),
        ({"lm_head.weight": torch.zeros(320, 64)}, "beside its adapter it has lm_head.weight"),
    ],
)
def test_a_reward_adapter_without_its_scalar_head_is_refused(
    make_backbone: Callable[..., Backbone], tmp_path: Path, extra: dict, message: str
) -> None:
    make_backbone().save_adapter("sft", tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{key}": value for key, value in extra.items()}, file)
    with pytest.raises(BaseModelError, match=message):
        import_reward_model(make_backbone(adapters=()), "reward", str(tmp_path))


def test_a_folder_that_holds_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"judge\.from is '.*nowhere' but that folder does not exist"):
        locate_own("judge.from", str(tmp_path / "nowhere"))
    with pytest.raises(BaseModelError, match=r"has no adapter_config\.json and no config\.json"):
        locate_own("judge.from", str(tmp_path))


def test_a_hub_model_must_name_its_revision() -> None:
    section = read_params(Path(__file__).parent.parent / "recipes/demo.yaml")["reward"] | {"from": "hf://org/name"}
    with pytest.raises(ParameterError, match=r"reward\.from is 'hf://org/name' but a hub model must name its revision"):
        parse_section("reward", RewardParams, section)
    with pytest.raises(ParameterError, match=r"reward\.form is not a parameter; did you mean reward\.from\?"):
        parse_section("reward", RewardParams, section | {"form": None, "from": None})


# --- whole models ---


@pytest.mark.parametrize("pad", ["<|endoftext|>", None])
def test_a_classifier_is_asked_in_its_own_template(tokenizer: ChatTokenizer, tmp_path: Path, pad: str | None) -> None:
    """Report NovaSky-AI/SkyRL#123 from the other side: where tokenizers differ, text goes between them and nothing else."""
    model = load(write_classifier(tmp_path, pad=pad), tokenizer)
    rows = sequences([(tokenizer.prompt_ids(p.prompt), tokenizer.response_ids(p.rejected)[0]) for p in PAIRS])
    alone = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = []
    for one in PAIRS:
        text = f"<|im_start|><|start_header_id|>user<|end_header_id|>\n\n{one.prompt[0].content}<|eot_id|>"
        text += f"<|start_header_id|>assistant<|end_header_id|>\n\n{one.rejected}<|eot_id|>"
        ids = model.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected.append(alone(ids).logits[0, 0])
    scores_B = model.score_all(rows, 512)
    torch.testing.assert_close(scores_B, torch.stack(expected), rtol=1e-4, atol=1e-5)
    model.move(torch.tensor(0.5))
    torch.testing.assert_close(model.score_all(rows, 1), scores_B + 0.5, rtol=1e-4, atol=1e-5)


def test_the_classifier_hears_the_whole_conversation(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    model = load(write_classifier(tmp_path), tokenizer)
    chat = (user("hi"), assistant("yo"), user("why?"))
    ids = tokenizer.prompt_ids(chat)
    model.conversations[tuple(ids)] = chat
    [heard] = model._texts(sequences([(ids, tokenizer.response_ids("so.")[0])]))
    assert as_dicts(heard) == as_dicts((*chat, assistant("so.")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_labels": 2}, "a model of 2 labels, but a reward model has 1"),
        ({"template": None}, "its tokenizer has no chat template"),
    ],
)
def test_a_classifier_that_gives_no_score_is_refused(
    tokenizer: ChatTokenizer, tmp_path: Path, settings: dict, message: str
) -> None:
    with pytest.raises(BaseModelError, match=message):
        load(write_classifier(tmp_path, **settings), tokenizer)


def test_a_language_model_is_no_reward_model(tokenizer: ChatTokenizer, tiny_folders: Callable) -> None:
    """Report huggingface/trl#297: a head is never made up."""
    with pytest.raises(BaseModelError, match=r"it lacks score\.weight: a reward model's head is never made up"):
        load(tiny_folders(), tokenizer)


def test_a_conversation_that_is_too_long_for_it_is_named(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    model = load(write_classifier(tmp_path, n_positions=16), tokenizer)
    rows = sequences([(tokenizer.prompt_ids(PAIRS[0].prompt), tokenizer.response_ids("x" * 20)[0])])
    with pytest.raises(BaseModelError, match=r"has 16 positions but a conversation is \d+ of its tokens long"):
        model.score_all(rows, 1)


def test_the_record_says_which_model_it_was(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    save_record(tmp_path, "ab" * 32, -0.25)
    assert read_record(tmp_path) == ("ab" * 32, -0.25)
