"""The transferability of patches (TVT): a critic in the last block of a ViT, which belongs to the model."""

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class Transferability(nn.Module):
    """How much the class token may take from each patch in the last block. A critic tells source from target by the key
    of a patch, in each head; the weight of the patch is the critic's entropy in bits: 1 where it cannot tell, 0 where
    it is sure."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        dim, self.prefix = backbone.blocks[-1].attn.head_dim, backbone.num_prefix_tokens
        self.critic = nn.Sequential(
            nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 1), nn.Flatten(-2)
        )
        for layer in self.critic:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, keys: Tensor) -> Tensor:
        """[B, N, heads, d] -> [B, N, heads, 1]: the factors of all tokens."""
        return self.factors(self.logits(keys))

    def logits(self, keys: Tensor) -> Tensor:
        """[B, N, heads, d] -> [B, patches, heads]: positive for source."""
        logits: Tensor = self.critic(keys[:, self.prefix :])
        return logits.float()

    def factors(self, logits: Tensor) -> Tensor:
        """[B, patches, heads] -> [B, N, heads, 1]. Class and register tokens have 1."""
        return F.pad(bits(logits), (0, 0, self.prefix, 0), value=1.0)[..., None]


def bits(logits: Tensor) -> Tensor:
    """The entropy of a decision between two, by its logit."""
    return (F.softplus(logits) - logits * logits.sigmoid()) / math.log(2)
