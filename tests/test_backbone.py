"""One base, many adapters: what is loaded, saved, trained and refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from conftest import LORA, ROOT, base_params, runtime
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from pipeline.backbone import Backbone, BaseIdentity
from pipeline.base_model import fingerprint, locate, public_name
from pipeline.data.examples import sequences
from pipeline.errors import BaseModelError, TrainingError
from pipeline.heads import ScalarHead
from pipeline.loading import load_backbone, pick_device
from pipeline.lora import Linear4bit
from pipeline.quantization import FrozenLinear4bit
from pipeline.roles import Policy, RewardModel
from pipeline.tiny import write_tiny_model
from pipeline.weights import HEAD, load_head, save_head

ROWS = sequences([([5, 6, 7], [8, 9, 2]), ([10, 11, 12, 13, 14, 15, 16, 17, 18], [19, 2])])


def states(backbone: Backbone, adapter: str | None) -> torch.Tensor:
    with backbone.inference():
        backbone.activate(adapter)
        return backbone.hidden(ROWS.tokens_BT, ROWS.attention_mask_BT)


# --- 4-bit linears ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_is_f_linear_on_the_dequantised_weight(make_backbone: Callable[..., Backbone], dtype: str) -> None:
    backbone = make_backbone(quantization="nf4", dtype=dtype, base_cache="off")
    layer = next(module for module in backbone.causal.modules() if isinstance(module, FrozenLinear4bit))
    weight_OI = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(getattr(torch, dtype))
    x = torch.randn(3, layer.in_features, dtype=getattr(torch, dtype), requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(layer(x), F.linear(x, weight_OI))
    torch.testing.assert_close(x.grad, weight_OI.sum(0).expand(3, -1))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_base_cache_changes_no_bit_of_states_loss_and_gradients(
    make_backbone: Callable[..., Backbone], family: str, dtype: str, checkpointing: bool
) -> None:
    found = []
    for base_cache in ("on", "off"):
        backbone = make_backbone(
            family, quantization="nf4", dtype=dtype, base_cache=base_cache, gradient_checkpointing=checkpointing
        )
        layers = [module for module in backbone.causal.modules() if isinstance(module, FrozenLinear4bit)]
        assert all((layer.cached_weight_OI is not None) == (base_cache == "on") for layer in layers)
        parameters = backbone.train("sft")
        with backbone.training(dropout=False):
            loss = -Policy(backbone, "sft", 1.0, 16)(ROWS).logprobs_BR.sum()
            loss.backward()
        found.append([states(backbone, "sft"), loss.detach(), *(parameter.grad for parameter in parameters)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("adapted", [True, False])
def test_without_a_cache_no_dequantised_weight_is_kept_for_the_backward_pass(
    make_backbone: Callable[..., Backbone], adapted: bool
) -> None:
    """They exist one at a time: what autograd keeps is the same with and without a cache, and no weight is in it."""
    backbone = make_backbone(quantization="nf4", base_cache="off")
    parameters = backbone.train("sft")
    backbone.activate("sft" if adapted else None)
    layer = next(module for module in backbone.causal.modules() if isinstance(module, FrozenLinear4bit))
    shape = (layer.out_features, layer.in_features)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tuple(tensor.shape)), tensor)[1], lambda t: t
    ):
        x = torch.randn(3, 2, layer.in_features, requires_grad=True)
        owner = next(module for module in backbone.causal.modules() if getattr(module, "base_layer", None) is layer)
        owner(x).sum().backward()
    assert shape not in kept and shape[::-1] not in kept
    assert len(kept) == (4 if adapted else 0) and len(parameters) == 28
    torch.testing.assert_close(x.grad[0, 0], owner(torch.eye(layer.in_features)).sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("free", "cached"), [(0.9, False), (1.1, True)])
def test_auto_caches_where_it_takes_less_than_half_of_the_free_memory(
    make_backbone: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch, free: float, cached: bool
) -> None:
    """14 linears of a tiny Llama: per block q and o of 64 x 64, k and v of 32 x 64, gate, up and down of 128 x 64; 4 bytes each."""
    needed = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64) * 4
    monkeypatch.setattr("pipeline.quantization.free_memory", lambda device: free * 2 * needed)
    backbone = make_backbone(quantization="nf4", base_cache="auto")
    layers = [module for module in backbone.causal.modules() if isinstance(module, FrozenLinear4bit)]
    assert len(layers) == 14
    assert all((layer.cached_weight_OI is not None) == cached for layer in layers)


def test_all_linears_but_the_head_are_quantised(make_backbone: Callable[..., Backbone]) -> None:
    """Report unslothai/unsloth#5027: heads are never quantised."""
    backbone = make_backbone(quantization="nf4")
    assert isinstance(backbone.head_VH, torch.nn.Parameter) and backbone.head_VH.dtype == torch.float32
    assert sum(isinstance(module, Linear4bit) for module in backbone.causal.modules()) == 14
    head = ScalarHead(backbone.hidden_size, std=0.1)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    assert head(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.float32


def test_shapes_that_nf4_does_not_fit_are_named(tiny_folders: Callable[..., Path]) -> None:
    folder = tiny_folders("llama", intermediate_size=96)
    with pytest.raises(
        BaseModelError,
        match=r"layer model\.layers\.0\.mlp\.down_proj is 96 in, 64 out; NF4 needs multiples of 64 in and 32 out",
    ):
        load_backbone(folder, base_params(quantization="nf4"), runtime(), BaseIdentity("f", 259, "tiny"))


# --- adapters ---


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gpt2"])
def test_our_lora_forward_is_pefts(
    make_backbone: Callable[..., Backbone], tiny_folders: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """A saved adapter is one that PEFT loads, and PEFT computes the same with it."""
    backbone = make_backbone(family)
    backbone.save_adapter("sft", tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_folders(family), dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        expected = theirs(input_ids=ROWS.tokens_BT, attention_mask=ROWS.attention_mask_BT.long()).logits
    ours = F.linear(states(backbone, "sft"), backbone.head_VH)
    mask_BT = ROWS.attention_mask_BT
    torch.testing.assert_close(ours[mask_BT], expected[mask_BT], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours[mask_BT], F.linear(states(backbone, None), backbone.head_VH)[mask_BT], atol=1e-3)


def test_saved_twice_is_equal_byte_for_byte_and_names_no_path(
    make_backbone: Callable[..., Backbone], tmp_path: Path
) -> None:
    backbone = make_backbone(adapters=("sft", "policy"))
    backbone.save_adapter("sft", tmp_path / "a")
    backbone.load_adapter("again", tmp_path / "a")
    backbone.save_adapter("again", tmp_path / "b")
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors", "origin.json"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    assert config["target_modules"] == sorted(config["target_modules"])
    assert str(tmp_path) not in (tmp_path / "a" / "adapter_config.json").read_text()


def test_one_adapter_is_trainable_whatever_is_switched(make_backbone: Callable[..., Backbone]) -> None:
    """Reports huggingface/peft#282 and our own: PEFT's switches change what is trainable."""
    backbone = make_backbone(adapters=("sft", "policy"))
    parameters = backbone.train("policy")
    assert len(parameters) == 28  # A and B of 14 layers
    for switch in (None, "sft", "policy", None):
        backbone.activate(switch)
        trainable = {name for name, parameter in backbone.causal.named_parameters() if parameter.requires_grad}
        assert len(trainable) == 28 and all(".policy." in name for name in trainable)


def test_switching_adapters_and_back_changes_no_bit(make_backbone: Callable[..., Backbone]) -> None:
    backbone = make_backbone(adapters=("sft", "policy"))
    before = {name: states(backbone, name) for name in ("sft", "policy", None)}
    assert not torch.equal(before["sft"], before["policy"])
    for name in (None, "policy", "sft"):
        assert torch.equal(states(backbone, name), before[name])


def test_a_fresh_adapter_changes_nothing(make_backbone: Callable[..., Backbone]) -> None:
    backbone = make_backbone(perturb=False)
    assert torch.equal(states(backbone, "sft"), states(backbone, None))


def test_an_adapter_of_another_base_is_refused(make_backbone: Callable[..., Backbone], tmp_path: Path) -> None:
    backbone = make_backbone()
    backbone.save_adapter("sft", tmp_path)
    backbone.identity = BaseIdentity("e" * 64, 259, "tiny")
    with pytest.raises(BaseModelError, match="was trained on base ffffffffffff but the present base is eeeeeeeeeeee"):
        backbone.load_adapter("other", tmp_path)
    backbone.identity = BaseIdentity("f" * 64, 260, "tiny")
    with pytest.raises(BaseModelError, match="a tokenizer of 259 tokens but the present one has 260"):
        backbone.load_adapter("other", tmp_path)


def test_missing_and_damaged_adapters_are_named(make_backbone: Callable[..., Backbone], tmp_path: Path) -> None:
    backbone = make_backbone()
    with pytest.raises(BaseModelError, match=r"origin\.json is missing or damaged"):
        backbone.load_adapter("other", tmp_path)
    backbone.save_adapter("sft", tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BaseModelError, match=r"adapter_model\.safetensors is missing or damaged"):
        backbone.load_adapter("other", tmp_path)


def test_a_non_finite_adapter_is_never_saved(make_backbone: Callable[..., Backbone], tmp_path: Path) -> None:
    """Report MakazhanAlpamys/Soup#532."""
    backbone = make_backbone()
    with torch.no_grad():
        backbone.adapter_parameters("sft")[3].fill_(float("nan"))
    with pytest.raises(TrainingError, match="sft is not saved: 1 of its tensors hold NaN or infinity"):
        backbone.save_adapter("sft", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- heads ---

SCORE_IN_A_FRESH_PROCESS = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from test_backbone import ROWS, reward_model_from
print([score.hex() for score in reward_model_from({base!r}, {folder!r}).score_all(ROWS, 100).tolist()])
"""


def reward_model_from(base: str, folder: str) -> RewardModel:
    """A reward model as the stages load it."""
    backbone = load_backbone(
        Path(base), base_params(quantization="nf4"), runtime(), BaseIdentity("f" * 64, 259, "tiny")
    )
    backbone.load_adapter("reward", Path(folder))
    return RewardModel(backbone, "reward", load_head(Path(folder), backbone.hidden_size, backbone.device))


def test_scores_are_equal_in_a_fresh_process(
    make_backbone: Callable[..., Backbone], tiny_folders: Callable[..., Path], tmp_path: Path
) -> None:
    """Report huggingface/peft#577: the head is saved, and bit for bit the same."""
    backbone = make_backbone(adapters=("reward",), quantization="nf4")
    head = ScalarHead(backbone.hidden_size, std=0.1)
    torch.nn.init.constant_(head.linear.bias, -0.25)
    scores_B = RewardModel(backbone, "reward", head).score_all(ROWS, 100)
    backbone.save_adapter("reward", tmp_path)
    save_head(head, tmp_path)
    program = SCORE_IN_A_FRESH_PROCESS.format(
        tests=str(ROOT / "tests"), root=str(ROOT), base=str(tiny_folders()), folder=str(tmp_path)
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout.strip() == str([score.hex() for score in scores_B.tolist()])


def test_a_missing_or_wrong_head_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"head\.safetensors is missing or damaged"):
        load_head(tmp_path, 64, torch.device("cpu"))
    save_head(ScalarHead(32, std=0.1), tmp_path)
    assert (tmp_path / HEAD).is_file()
    with pytest.raises(BaseModelError, match="not a scalar head for hidden size 64"):
        load_head(tmp_path, 64, torch.device("cpu"))


def test_score_is_read_at_the_last_real_token(make_backbone: Callable[..., Backbone]) -> None:
    """Reports huggingface/transformers#35352 and huggingface/trl#2778: token 2 is pad, eos and part of the prompt."""
    backbone = make_backbone(adapters=("reward",))
    model = RewardModel(backbone, "reward", ScalarHead(backbone.hidden_size, std=0.1))
    rows = sequences([([5, 2, 6], [8, 9, 2]), ([5, 2, 6], [8, 7, 2]), ([10, 2, 12, 13, 14, 15, 2, 17, 18], [19, 2])])
    together_B = model.score_all(rows, 1000)
    alone_B = torch.cat([model.score_all(row, 1) for row in rows.split(1)])
    torch.testing.assert_close(together_B, alone_B, rtol=0, atol=1e-4)
    assert abs(float(together_B[0] - together_B[1])) > 1e-3  # only the answer differs


def test_padding_on_the_left_gives_the_same_states(make_backbone: Callable[..., Backbone]) -> None:
    backbone = make_backbone()
    width = ROWS.tokens_BT.shape[1]
    right_BTH = states(backbone, "sft")
    left_BT = torch.stack([row.roll(width - int(n)) for row, n in zip(ROWS.tokens_BT, ROWS.lengths_B, strict=True)])
    left_mask_BT = torch.stack(
        [row.roll(width - int(n)) for row, n in zip(ROWS.attention_mask_BT, ROWS.lengths_B, strict=True)]
    )
    with backbone.inference():
        left_BTH = backbone.hidden(left_BT, left_mask_BT)
    torch.testing.assert_close(left_BTH[left_mask_BT], right_BTH[ROWS.attention_mask_BT], rtol=1e-4, atol=1e-4)


# --- bases ---


def test_a_base_that_cannot_be_found_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        BaseModelError, match=r"base\.model is '/no/such' but that folder does not exist; give embedded"
    ):
        locate("/no/such")
    with pytest.raises(BaseModelError, match=r"has no config\.json"):
        locate(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BaseModelError, match=r"has no \.safetensors file"):
        locate(str(tmp_path))


def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BaseModelError, match=r"base\.model is 'hf://org/name@main' but the hub did not give it"):
        locate("hf://org/name@main")


def test_fingerprint_sees_weights_and_tokenizer_but_not_library_versions(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "a")
    write_tiny_model(tmp_path / "b")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9"}))
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")
    write_tiny_model(tmp_path / "c", seed=1)
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "c")


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_weights_are_those_that_transformers_loads_from_one_file_or_several(
    tiny_folders: Callable[..., Path], tmp_path: Path, quantization: str
) -> None:
    """To the bit. Only files of the index count: Mistral's folders hold all weights once more beside them."""
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    chosen = {"quantization_config": nf4} if quantization == "nf4" else {}
    AutoModelForCausalLM.from_pretrained(tiny_folders()).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    (tmp_path / "consolidated.safetensors").write_bytes(b"of another layout")
    theirs = AutoModelForCausalLM.from_pretrained(tiny_folders(), dtype=torch.float32, **chosen).state_dict()
    for folder in (tiny_folders(), tmp_path):
        params = base_params(quantization=quantization, dtype="float32")
        ours = load_backbone(folder, params, runtime(), BaseIdentity("f", 259, "tiny")).causal.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


def test_weights_that_are_not_there_are_named(tiny_folders: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_folders() / "config.json").read_bytes())
    with pytest.raises(BaseModelError, match=r"cannot be loaded from .*model\.safetensors"):
        load_backbone(tmp_path, base_params(), runtime(), BaseIdentity("f", 259, "tiny"))


def test_a_token_without_an_embedding_row_is_refused(tiny_folders: Callable[..., Path]) -> None:
    """Report meta-llama/llama-cookbook#189."""
    with pytest.raises(BaseModelError, match="has 321 tokens but the embedding table 320 rows"):
        load_backbone(tiny_folders(), base_params(), runtime(), BaseIdentity("f", 321, "tiny"))


def test_a_gpu_that_is_not_there_is_said() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(BaseModelError, match=r"runtime\.device is cuda but torch sees no GPU"):
            pick_device(runtime(device="cuda"))
    assert pick_device(runtime(device="cpu")) == torch.device("cpu")


def test_logits_that_are_more_than_states_times_head_are_refused(tiny_folders: Callable[..., Path]) -> None:
    """Gemma 2 caps its logits: our log-probabilities would be wrong without a word."""
    folder = tiny_folders("gemma2", head_dim=16, final_logit_softcapping=1.0)
    with pytest.raises(BaseModelError, match="is a gemma2, whose logits are not hidden states times its output matrix"):
        load_backbone(folder, base_params(), runtime(), BaseIdentity("f", 259, "tiny"))


def test_targets_that_match_no_layer_are_named(make_backbone: Callable[..., Backbone]) -> None:
    with pytest.raises(BaseModelError, match=r"lora\.targets does not fit this base: .*query_key_value"):
        make_backbone(adapters=()).add_adapter("sft", LORA.model_copy(update={"targets": ["query_key_value"]}))


def test_names_hold_no_path_of_this_machine() -> None:
    assert public_name("/home/me/models/mine") == ("mine", None)
    assert public_name("hf://org/name@abc") == ("org/name", "abc")
    assert public_name("embedded") == ("embedded", None)


def test_a_policy_without_layers_to_adapt_is_an_error(make_backbone: Callable[..., Backbone]) -> None:
    backbone = make_backbone()
    with pytest.raises(TrainingError, match=r"There is no adapter nothing to train"):
        backbone.train("nothing")


def test_lora_dropout_acts_in_sft_and_never_in_rl(make_backbone: Callable[..., Backbone]) -> None:
    """Report huggingface/trl#3500."""
    backbone = make_backbone(adapters=())
    backbone.add_adapter("sft", LORA.model_copy(update={"dropout": 0.5}))
    with torch.no_grad():
        for parameter in backbone.adapter_parameters("sft"):
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model = Policy(backbone, "sft", 1.0, 16)
    with backbone.inference():
        expected = model(ROWS).logprobs_BR
    with backbone.training(dropout=False):
        assert torch.equal(model(ROWS).logprobs_BR, expected)
        with backbone.inference():
            assert torch.equal(model(ROWS).logprobs_BR, expected)
        assert torch.equal(model(ROWS).logprobs_BR, expected)  # what was inside has restored the mode exactly
    with backbone.training(dropout=True):
        assert not torch.allclose(model(ROWS).logprobs_BR, expected, atol=1e-3)
    with backbone.training(dropout=False):
        assert torch.equal(model(ROWS).logprobs_BR, expected)
