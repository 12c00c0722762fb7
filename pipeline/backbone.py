"""One frozen, possibly quantised base with named LoRA adapters; which of them is active; load, save, hash.

Axes: B batch, T tokens, H hidden, V vocabulary.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.errors import BaseModelError, TrainingError
from pipeline.files import write_json
from pipeline.lora import replace_forwards
from pipeline.params.base import LoraParams
from pipeline.sharding import shard
from pipeline.weights import CONFIG, ORIGIN, WEIGHTS, hash_tensors, read_json, read_tensors, save_tensors


@dataclass(frozen=True)
class BaseIdentity:
    """What an adapter is made on.

    name, revision: what others may call it; no path of this machine.
    """

    fingerprint: str
    tokenizer_length: int
    name: str
    revision: str | None = None


class Backbone:
    """The base and its adapters. At most one adapter is active, and at most one is trainable."""

    def __init__(
        self,
        causal: PreTrainedModel,
        device: torch.device,
        identity: BaseIdentity,
        checkpointing: bool = False,
        packing: bool = False,
        sharded: bool = False,
    ):
        self.causal = causal
        self.decoder = causal.base_model
        self.device = device
        self.identity = identity
        self.packing = packing
        self.sharded = sharded
        self.head_VH: Tensor = causal.get_output_embeddings().weight
        self.hidden_size: int = self.head_VH.shape[1]
        self._peft: PeftModel | None = None
        self._active: str | None = None
        self._trainable: str | None = None
        causal.requires_grad_(False)
        causal.eval()
        if checkpointing:
            causal.activation_checkpointing_enable({"use_reentrant": False})

    # --- adapters ---

    def add_adapter(self, name: str, params: LoraParams) -> None:
        """A new adapter: A random, B zero, so that at first it changes nothing.

        Raises:
            BaseModelError: `params.targets` names no layer of this base, or one that would not be trained.
        """
        config = LoraConfig(
            r=params.r,
            lora_alpha=params.alpha,
            lora_dropout=params.dropout,
            target_modules=params.targets,
            task_type="CAUSAL_LM",
        )
        self._attach(name, config)

    def load_adapter(self, name: str, folder: Path) -> None:
        """An adapter from a folder in PEFT's format, frozen until `train` names it.

        Raises:
            BaseModelError: files are missing or do not fit, or the adapter was made on another base.
        """
        self.check_origin(folder)
        self.fill_adapter(name, folder, read_json(folder / CONFIG), read_tensors(folder / WEIGHTS))

    def check_origin(self, folder: Path) -> None:
        """Raises:
        BaseModelError: what this project left in the folder was made on another base or with another tokenizer.
        """
        origin = read_json(folder / ORIGIN)
        if origin["base_fingerprint"] != self.identity.fingerprint:
            raise BaseModelError(
                f"{folder} was trained on base {origin['base_fingerprint'][:12]} but the present base is {self.identity.fingerprint[:12]}; "
                "the base has changed under it: run `dvc repro` to train again, or put the old base back."
            )
        if origin["tokenizer_length"] != self.identity.tokenizer_length:
            raise BaseModelError(
                f"{folder} was trained with a tokenizer of {origin['tokenizer_length']} tokens but the present one has "
                f"{self.identity.tokenizer_length}; use the tokenizer that it was trained with."
            )

    def fill_adapter(self, name: str, folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """An adapter of these settings and tensors, both as PEFT writes them; `folder` is for errors.

        Raises:
            BaseModelError: tensors are missing, unknown or of another shape than the base asks for.
        """
        config = LoraConfig.from_peft_type(**settings)
        config.inference_mode = False
        self._attach(name, config)
        try:
            outcome = set_peft_model_state_dict(self._peft, tensors, adapter_name=name)
        except RuntimeError as error:  # torch's, for shapes
            first = " ".join(str(error).split()).partition("size mismatch")[2]
            raise BaseModelError(
                f"{folder / WEIGHTS} does not fit this base: shapes differ{first[:200]}; it was trained on another model."
            ) from error
        missing = [key for key in outcome.missing_keys if f".{name}." in key]
        if missing or outcome.unexpected_keys:
            raise BaseModelError(
                f"{folder / WEIGHTS} does not fit this base: {len(missing)} tensors missing, {len(outcome.unexpected_keys)} unknown; "
                "it was trained with other lora.targets or another model."
            )

    def save_adapter(self, name: str, folder: Path) -> None:
        """Adapter `name` in PEFT's format, float32; the same adapter gives the same bytes.

        Raises:
            TrainingError: a weight is not finite; nothing is written.
            StorageError: there is no room, or the folder cannot be written to.
        """
        tensors = {key: tensor.float() for key, tensor in sorted(self.adapter_state(name).items())}
        save_tensors(name, tensors, folder / WEIGHTS, metadata={"format": "pt"})
        # PEFT itself writes a set in random order and the base's absolute path.
        settings: dict[str, Any] = self._peft.peft_config[name].to_dict()
        settings |= {
            "base_model_name_or_path": self.identity.name,
            "revision": self.identity.revision,
            "inference_mode": True,
        }
        settings = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
        write_json(folder / CONFIG, settings)
        origin = {"base_fingerprint": self.identity.fingerprint, "tokenizer_length": self.identity.tokenizer_length}
        write_json(folder / ORIGIN, origin)

    def adapter_state(self, name: str) -> dict[str, Tensor]:
        """The adapter's tensors under PEFT's file names."""
        # save_embedding_layers: "auto" would ask the model hub about the base
        return get_peft_model_state_dict(self._peft, adapter_name=name, save_embedding_layers=False)

    @property
    def adapters(self) -> list[str]:
        """The names of those that are on the base."""
        return sorted(self._peft.peft_config) if self._peft else []

    def adapter_parameters(self, name: str) -> list[nn.Parameter]:
        """The adapter's parameters, in a fixed order."""
        return [parameter for key, parameter in self.causal.named_parameters() if _belongs_to(key, name)]

    def adapter_hash(self, name: str) -> str:
        """SHA-256 of the adapter's values."""
        return hash_tensors(self.adapter_state(name))

    def base_hash(self) -> str:
        """SHA-256 of everything that is not an adapter, packed weights and their scales included."""
        return hash_tensors({key: value for key, value in self.causal.state_dict().items() if ".lora_" not in key})

    def train(self, name: str) -> list[nn.Parameter]:
        """Makes `name` the one trainable adapter; its parameters. With FSDP, processes hold the base together from here on.

        Raises:
            TrainingError: the adapter has no parameters.
        """
        parameters = self.adapter_parameters(name)
        if not parameters:
            raise TrainingError(f"There is no adapter {name} to train, or it has no parameters.")
        if self.sharded:
            shard(self.decoder, self.device)
        self._trainable = name
        self.activate(name)
        self._say_what_is_trainable()
        return parameters

    def activate(self, name: str | None) -> None:
        """Switches to an adapter, or with None to the raw base. What is trainable does not change."""
        if name == self._active:
            return
        assert self._peft is not None and (name is None or name in self._peft.peft_config), (
            f"there is no adapter {name}"
        )
        if name is None:
            self._peft.base_model.disable_adapter_layers()
        else:
            self._peft.base_model.enable_adapter_layers()
            self._peft.base_model.set_adapter(name, inference_mode=True)
        self._active = name
        self._say_what_is_trainable()

    def _say_what_is_trainable(self) -> None:
        """PEFT's switches turn gradients on by themselves, so what may be trained is said after each."""
        for key, parameter in self.causal.named_parameters():
            parameter.requires_grad_(_belongs_to(key, self._trainable))

    # --- forward passes ---

    @contextlib.contextmanager
    def training(self, dropout: bool) -> Iterator[None]:
        """Train mode, in which gradient checkpointing works, with or without the adapter's dropout; restored after."""
        with self._modes_restored():
            self.causal.train()
            for module in self.causal.modules():
                if isinstance(module, nn.Dropout) and not dropout:
                    module.eval()
            yield

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Eval mode without gradients: no dropout, no checkpointing; restored after."""
        with self._modes_restored(), torch.no_grad():
            self.causal.eval()
            yield

    @contextlib.contextmanager
    def _modes_restored(self) -> Iterator[None]:
        before = [(module, module.training) for module in self.causal.modules()]
        try:
            yield
        finally:
            for module, training in before:
                module.training = training

    def hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
        """Last hidden states, after the final norm, under the active adapter; [B, T, H]. At padding they mean nothing."""
        if self.packing:
            return self._hidden_packed(tokens_BT, attention_mask_BT)
        return self.decoder(
            input_ids=tokens_BT,
            attention_mask=attention_mask_BT.long(),
            position_ids=positions(attention_mask_BT),
            use_cache=False,
        ).last_hidden_state

    def _hidden_packed(self, tokens_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
        """All rows as one, without padding between them.

        Where no mask is given and position ids start anew, transformers lets no token see the tokens of other rows.
        """
        states_1NH = self.decoder(
            input_ids=tokens_BT[attention_mask_BT][None],
            position_ids=positions(attention_mask_BT)[attention_mask_BT][None],
            use_cache=False,
        ).last_hidden_state
        padding_BTH = states_1NH.new_zeros(*tokens_BT.shape, self.hidden_size)
        return padding_BTH.masked_scatter(attention_mask_BT[..., None], states_1NH)

    def decode(self, tokens_BT: Tensor, attention_mask_BS: Tensor, cache: Any) -> Tensor:
        """The last hidden state of each row, after the final norm; the tokens' states join the cache; [B, H].

        attention_mask_BS covers the cache and the new tokens.
        """
        hidden_BTH = self.decoder(
            input_ids=tokens_BT,
            attention_mask=attention_mask_BS.long(),
            position_ids=positions(attention_mask_BS)[:, -tokens_BT.shape[1] :],
            cache=cache,
            use_cache=True,
        ).last_hidden_state
        # contiguous: on CPU in bfloat16 a frozen head on a non-contiguous slice is 300 times slower
        return hidden_BTH[:, -1].contiguous()

    # --- inside ---

    def _attach(self, name: str, config: LoraConfig) -> None:
        try:
            if self._peft is None:
                self._peft = get_peft_model(self.causal, config, adapter_name=name)
            else:
                self._peft.add_adapter(name, config)
        except ValueError as error:  # PEFT found no layer of these names
            raise BaseModelError(
                f"lora.targets does not fit this base: {' '.join(str(error).split())[:200]}"
            ) from error
        replace_forwards(self.causal)
        for module in self.causal.modules():
            if isinstance(module, nn.ParameterDict | nn.ModuleDict) and name in module:
                module[name].to(self.device)
        self._active = "?"  # PEFT has switched by itself; the next line says to what
        self.activate(name)


def positions(attention_mask_BT: Tensor) -> Tensor:
    """Position ids that count real tokens only, so that the padding side cannot matter; [B, T]."""
    return (attention_mask_BT.long().cumsum(1) - 1).clamp(min=0)


def _belongs_to(key: str, adapter: str | None) -> bool:
    return adapter is not None and ".lora_" in key and f".{adapter}." in key
