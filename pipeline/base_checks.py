"""What the rest takes for granted of a base, tried on a few tokens when it is loaded.

Axes: B batch, T tokens, H hidden.
"""

import torch
import torch.nn.functional as F

from pipeline.backbone import Backbone
from pipeline.errors import BaseModelError


@torch.no_grad()
def check_output_head(backbone: Backbone) -> None:
    """Log-probabilities are taken from hidden states and the output matrix: refuse models whose logits are more than that.

    Raises:
        BaseModelError: the model is one of those.
    """
    tokens_BT = torch.arange(4, 8, device=backbone.device)[None]
    expected = backbone.causal(input_ids=tokens_BT, use_cache=False).logits[0].float()
    hidden_BTH = backbone.hidden(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool))
    ours = F.linear(hidden_BTH[0], backbone.head_VH).float()
    if not torch.allclose(ours, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        kind = backbone.causal.config.model_type
        raise BaseModelError(
            f"base.model is a {kind}, whose logits are not hidden states times its output matrix (soft caps, scales); choose a Llama, Mistral, Qwen2 or GPT-2 model."
        )


@torch.no_grad()
def check_packing(backbone: Backbone) -> None:
    """Two rows as one must be what each is alone: refuse models that let packed rows see each other.

    Raises:
        BaseModelError: the model is one of those.
    """
    tokens_BT = torch.arange(4, 12, device=backbone.device).view(2, 4)
    mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    alone_BTH = torch.cat([backbone.hidden(tokens_BT[[row]], mask_BT[[row]]) for row in range(2)])
    if not torch.allclose(
        backbone.hidden(tokens_BT, mask_BT), alone_BTH, rtol=2e-2, atol=2e-2 * float(alone_BTH.abs().max())
    ):
        raise BaseModelError(
            f"runtime.packing is true but in a {backbone.causal.config.model_type} rows that are packed together see each other; "
            "set it to false."
        )
