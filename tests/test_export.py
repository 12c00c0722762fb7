"""What `make export` writes: plain transformers, in a process of its own, says what the adapter said."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from chat_styles import STYLES
from safetensors.torch import load_file
from taking import assistant, pair, system, user
from transformers import AutoModelForCausalLM

from pipeline.backbone import Backbone
from pipeline.data.base_tokenizer import load_tokenizer
from pipeline.data.templates import as_dicts
from pipeline.data.tokenization import ChatTokenizer
from pipeline.errors import BaseModelError
from pipeline.export.__main__ import save
from pipeline.export.agreement import Agreement, kl_of
from pipeline.export.folders import begin, publish
from pipeline.export.merge import classifier, language_model, merged_weights
from pipeline.export.scoring import score_agreement, whole_texts
from pipeline.export.serving import generation_config, padding_beside, policy_tokenizer, reward_tokenizer
from pipeline.heads import ScalarHead
from pipeline.roles import RewardModel

# Nothing of the project is imported here.
PLAIN = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
root = Path(sys.argv[1])
chats = json.loads((root / "chats.json").read_text())
found = {}
for folder in sorted(path for path in root.iterdir() if path.is_dir()):
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype="auto").eval()
    question = tokenizer.apply_chat_template(chats[0][:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        found[f"{folder.name}/logits"] = model(**question).logits[0].contiguous()
    assert model.generation_config.eos_token_id == [2] and model.generation_config.pad_token_id == 2
    answers = model.generate(**question)
    assert answers.shape[1] <= question["input_ids"].shape[1] + 24
    tokenizer = AutoTokenizer.from_pretrained(folder / "reward")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward", dtype="auto").eval()
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    for side in ("right", "left"):
        inputs = tokenizer.apply_chat_template(chats, padding=True, padding_side=side, return_tensors="pt", return_dict=True)
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(**inputs, position_ids=positions).logits
        assert logits.shape == (len(chats), 1)
        found[f"{folder.name}/scores/{side}"] = (logits[:, 0] + model.config.score_shift).contiguous()
save_file(found, root / "found.safetensors")
"""
CASES = {
    "llama-nf4": ("llama", {"quantization": "nf4"}),
    "llama-tied": ("llama", {"overrides": {"tie_word_embeddings": True}}),
    "qwen2-nf4": ("qwen2", {"quantization": "nf4"}),
    "gpt2": ("gpt2", {}),
    "gpt2-nf4": ("gpt2", {"quantization": "nf4"}),
}
PAIRS = [pair("What is tea?", "A drink.", "I would not know that."), pair("Why?", "So.", "Because it is.")]


def test_plain_transformers_says_the_same(
    make_backbone: Callable[..., Backbone], tiny_folders: Callable[..., Path], tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    """Reports huggingface/peft#2321 and huggingface/trl#297: merged into what the adapter was trained on, NF4 dequantised,
    and the reward model's head with it; one label; scores the same whatever the padding side, though pad == eos here."""
    texts = whole_texts(PAIRS, tokenizer, 4)
    (tmp_path / "chats.json").write_text(json.dumps([as_dicts(chat) for chat in texts.conversations]))
    expected = {}
    for name, (family, settings) in CASES.items():
        backbone = make_backbone(family, adapters=("policy", "reward"), **settings)
        base = tiny_folders(family, **settings.get("overrides", {}))
        head = ScalarHead(backbone.hidden_size, std=0.1)
        torch.nn.init.constant_(head.linear.bias, 0.75)
        scoring = reward_tokenizer(tokenizer)
        model = language_model(base, merged_weights(backbone, "policy"))
        model.generation_config = generation_config(tokenizer, 1.0, 2)
        folder = tmp_path / name
        save(model, policy_tokenizer(tokenizer), folder / "policy")
        weights = merged_weights(backbone, "reward")
        save(classifier(base, weights, head, padding_beside(tokenizer)), scoring, folder / "reward")
        scores_B = RewardModel(backbone, "reward", head).score_all(texts.rows, 512)
        expected |= {f"{name}/scores/{side}": scores_B for side in ("right", "left")}
        backbone.activate("policy")
        ids_BT = torch.tensor([tokenizer.prompt_ids(PAIRS[0].prompt)])
        with backbone.inference():
            expected[f"{name}/logits"] = F.linear(
                backbone.hidden(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool))[0], backbone.head_VH
            )
    done = subprocess.run([sys.executable, "-c", PLAIN, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "found.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")
        assert key.endswith("logits") or float(value.std()) > 0.01  # scores that were all alike would prove little


def test_the_merged_base_is_the_one_that_was_trained_on(
    make_backbone: Callable[..., Backbone], tiny_folders: Callable[..., Path]
) -> None:
    """A linear by hand: dequantised weight + B A * alpha / r; and what no adapter touches is as in the base's file."""
    backbone = make_backbone(quantization="nf4", adapters=("policy",))
    weights = merged_weights(backbone, "policy")
    layer = backbone.decoder.layers[1].mlp.down_proj
    product = layer.lora_B["policy"].weight @ layer.lora_A["policy"].weight * (8.0 / 4)
    expected = layer.base_layer.dequantized() + product
    torch.testing.assert_close(weights["model.layers.1.mlp.down_proj.weight"], expected.detach(), rtol=0, atol=1e-6)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folders(), dtype=torch.float32).state_dict()
    assert weights.keys() == plain.keys()
    untouched = [key for key in plain if "proj" not in key]
    assert len(untouched) == 7 and all(torch.equal(weights[key], plain[key]) for key in untouched)


@pytest.mark.parametrize("role", ["merge", "drop"])
@pytest.mark.parametrize("words", [None, 'It\'s "brief".\n{{ x }}'])
@pytest.mark.parametrize("style", STYLES)
def test_the_exported_template_gives_the_pipelines_prompts(
    tmp_path: Path, style: str, words: str | None, role: str
) -> None:
    """`tokens.system`, system messages where there is no place for them, and what opens an answer are in the template."""
    chat = STYLES[style].load(tmp_path, system=words, system_role=role)
    policy, reward = policy_tokenizer(chat), reward_tokenizer(chat)
    for prompt in (
        (user("hi"),),
        (system("Be brief."), user("hi")),
        (system("Be brief."), user("hi"), assistant("yo"), user("why?")),
    ):
        ids = policy.apply_chat_template(as_dicts(prompt), add_generation_prompt=True, return_dict=False)
        assert ids == chat.prompt_ids(prompt)
        scored = reward.apply_chat_template(as_dicts((*prompt, assistant("so."))), return_dict=False)
        assert scored == [*chat.prompt_ids(prompt), *chat.response_ids("so.")[0]]
    assert reward.pad_token_id != chat.end_id


def test_an_export_replaces_the_one_before_only_when_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    for words in ("first", "second"):
        partial = begin(folder)
        (partial / "README.md").write_text(words)
        publish(partial, folder)
        assert [path.name for path in tmp_path.iterdir()] == ["policy"]
        assert (folder / "README.md").read_text() == words
    (begin(folder) / "half").write_text("")  # and then the process dies
    assert (folder / "README.md").read_text() == "second"
    assert list(begin(folder).iterdir()) == []


def test_a_merge_that_is_not_the_adapter_is_refused() -> None:
    """KL by hand: of (3/4, 1/4) to (1/2, 1/2) it is 3/4 ln(3/2) + 1/4 ln(1/2)."""
    kl = float(kl_of(torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)))
    assert kl == pytest.approx(0.75 * 0.405465 - 0.25 * 0.693147, abs=1e-6)
    Agreement(same=1, prompts=2, kl=0.01, tokens=9, largest_kl=0.01).check()
    for bad in (0.011, float("nan")):
        with pytest.raises(BaseModelError, match=r"1 of 2 greedy answers .* \(at most 0\.01\); nothing is exported"):
            Agreement(same=1, prompts=2, kl=bad, tokens=9, largest_kl=0.01).check()


def test_scores_that_are_not_the_same_are_refused() -> None:
    """Scores -1 and 1 have a spread of 1; in float32 a mean distance of 0.001 may be, 0.5 may not."""
    scores_B = torch.tensor([-1.0, 1.0])
    score_agreement(scores_B, scores_B + 0.0005, torch.float32).check()
    with pytest.raises(BaseModelError, match=r"0\.5 apart on average and 0\.5 at most, with a spread of 1"):
        score_agreement(scores_B, scores_B + 0.5, torch.float32).check()


def test_forged_and_cut_prompts_are_not_compared_and_long_answers_only_so_far(
    tiny_folders: Callable[..., Path],
) -> None:
    """One token per byte: seven and an end token fit into eight."""
    chat = load_tokenizer(tiny_folders(), max_prompt=64, max_response=8)
    pairs = [pair("Why?", "So.", "Because it is."), pair("<|im_end|>?", "a", "b"), pair("x" * 80, "a", "b")]
    texts = whole_texts(pairs, chat, 9)
    assert [text[-1].content for text in texts.conversations] == ["So.", "Because"]
    assert texts.rows.response_lengths_B.tolist() == [4, 8]
    with pytest.raises(BaseModelError, match="nearly every held-out prompt is cut"):
        whole_texts(pairs[1:], chat, 9)
