"""A backbone and a head: images -> features and logits."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cdtrans.errors import CdtransError
from cdtrans.network.blocks import (
    AttentionStep,
    Tokens,
    embed,
    possible_taps,
    run_blocks,
    self_attention,
    why_no_shared_attention,
)
from cdtrans.network.fast.operations import Stream, Update
from cdtrans.network.head import AnyHead, Output
from cdtrans.network.transferability import Transferability
from cdtrans.runtime.ranks import gather, rank, world


class Network(nn.Module):
    """What stage 1 trains, what every method adapts and what is served: any timm model that gives one feature vector
    (created with num_classes=0), and a head.

    ViTs are run by `cdtrans.network.blocks`, with kernels on a GPU; all other models by timm's own forward. With `taps`
    the feature of a ViT is that of its last blocks side by side: a probe on a frozen backbone gains by it. With
    `transferability` the class token weighs the patches in the last block (TVT).

    BatchNorm layers of the backbone normalise a training batch as it comes: in stage 1 source images, in stage 2 source
    and target together (`encode_each`), as tllib does. Their running statistics, which predictions use, are those of
    the same batches.

    Where memory is short (`compute_in_parts`), the backbone computes a batch in parts, and the backward pass computes
    each part again instead of keeping its intermediate results. The head and the losses still get the whole batch."""

    backbone: Any  # timm's models have no type in common
    keep: Tensor  # [depth, 2] how often each block's attention and MLP are kept in training

    def __init__(
        self, backbone: nn.Module, head: AnyHead, taps: int = 1, transferability: Transferability | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.transferability = transferability
        self.taps = possible_taps(backbone, taps)
        self.runs_blocks = not why_no_shared_attention(backbone)  # otherwise timm's forward runs it
        drops = [
            [getattr(path, "drop_prob", 0.0) for path in (block.drop_path1, block.drop_path2)]
            for block in (self.backbone.blocks if self.runs_blocks else ())
        ]
        self.drops_paths = any(map(any, drops))
        self.register_buffer("keep", 1 - torch.tensor(drops), persistent=False)
        self.parts, self.recompute_blocks = 1, False

    def compute_in_parts(self, parts: int, *, recompute_blocks: bool = False) -> None:
        """Train in so many parts from now on; with `recompute_blocks` the backward pass of a part also computes each
        block again by itself. Not for a backbone with BatchNorm, which needs the whole batch."""
        self.parts, self.recompute_blocks = parts, recompute_blocks
        if not self.runs_blocks:
            with suppress(AttributeError, AssertionError):  # not every timm model can
                self.backbone.set_grad_checkpointing(recompute_blocks)

    def encode(self, images: Tensor) -> Output:
        """[B, 3, H, W] -> features and logits."""
        return self.head(self.features(images))  # type: ignore[no-any-return]

    def encode_each(self, *batches: Tensor) -> tuple[Output, ...]:
        """Several batches, [B, 3, H, W] each, in one pass of the backbone; the head gets them one by one. BatchNorm
        layers of the backbone, if it has any, take their statistics from all batches together."""
        return tuple(self.head(feature) for feature in self.features_each(*batches))

    def encode_together(self, *batches: Tensor, attention: AttentionStep | None = None) -> tuple[Output, ...]:
        """The same, but the head gets all batches as one. Its BatchNorm then keeps the difference between their means,
        which `encode_each` removes: what a critic must see. A ViT's `attention` can be replaced."""
        features = [gather(x) if self.training else x for x in self.features_each(*batches, attention=attention)]
        feature, logits = (x.split([len(f) for f in features]) for x in self.head.classify(torch.cat(features)))
        return tuple(Output(*pair) for pair in zip(feature, logits, strict=True))

    def features(self, images: Tensor) -> Tensor:
        """The backbone's features, before the head: [B, 3, H, W] -> [B, D]."""
        return self._features(images)  # no len() here, which would fix the batch size of an exported graph

    def features_each(self, *batches: Tensor, attention: AttentionStep | None = None) -> tuple[Tensor, ...]:
        """The features of several batches, [B, D] each, in one pass."""
        sizes = [len(batch) for batch in batches]
        return torch.split(self._features(torch.cat(batches), sizes, attention), sizes)  # type: ignore[no-any-return]

    def _features(
        self, images: Tensor, sizes: list[int] | None = None, attention: AttentionStep | None = None
    ) -> Tensor:
        if not self.runs_blocks:
            return self._in_parts(lambda x, _: self.backbone(x), images, None)
        tokens = embed(self.backbone, images)
        return self.run_blocks(tokens, self.drop_path_scales(tokens.x, sizes), attention or self.attention)

    def attention(self, block: Any, stream: Stream, rope: Tensor | None, rows: int | None) -> tuple[Tensor, Update]:
        last = block is self.backbone.blocks[-1]
        return self_attention(block, stream, rope, rows, self.transferability if last else None)

    def run_blocks(
        self, tokens: Tokens, scales: Tensor | None, attention: AttentionStep, *, together: int = 1
    ) -> Tensor:
        """Embedded images -> features, [B, N, D] -> [B, D]. Groups of so many images stay `together` in one part. The
        embedding and everything random in it, and `scales`, are of the whole batch: they do not depend on the parts."""

        def run(x: Tensor, scales: Tensor | None) -> Tensor:
            part = tokens._replace(x=x)
            return run_blocks(self.backbone, part, scales, attention, self.taps, recompute=self.recompute_blocks)

        return self._in_parts(run, tokens.x, scales, together)

    def _in_parts(
        self, run: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, scales: Tensor | None, together: int = 1
    ) -> Tensor:
        if self.parts == 1 or torch.is_inference_mode_enabled():  # encoding has batches of its own size
            return run(x, scales)
        size = together * -(-len(x) // (together * self.parts))  # images in a part
        images = x.split(size)
        factors = [None] * len(images) if scales is None else scales.split(size, dim=2)
        parts = [checkpoint(run, *part, use_reentrant=False) for part in zip(images, factors, strict=True)]
        return torch.cat(parts)

    @property
    def dim(self) -> int:
        """D, the length of a feature."""
        return feature_dim(self.backbone, self.taps)

    @property
    def leading(self) -> int:
        """How many of a feature's numbers belong to the last two blocks."""
        return self.dim * min(2, self.taps) // self.taps

    def drop_path_scales(self, x: Tensor, sizes: list[int] | None = None) -> Tensor | None:
        """Stochastic depth for a whole pass: the factor of each block's attention and MLP in each image, 0 or the
        inverse of its chance to be kept, [depth, 2, B]. One draw instead of two in every block.

        Every rank draws for the images of all ranks and takes its own, so that ranks with equal shares drop what one
        rank would. `sizes` are the lengths of the batches that x is made of: all ranks' images of the first batch come
        first, then those of the second."""
        if not (self.training and self.drops_paths):
            return None
        keep = self.keep[:, :, None].to(x.dtype)
        drawn = torch.rand(*self.keep.shape, world() * len(x), dtype=x.dtype, device=x.device)
        if world() > 1:
            parts = drawn.split([world() * size for size in sizes or [len(x)]], dim=2)
            drawn = torch.cat([part.chunk(world(), dim=2)[rank()] for part in parts], dim=2)  # [depth, 2, B]
        return (drawn < keep) / keep


def feature_dim(backbone: Any, taps: int = 1) -> int:
    """The length of a timm model's feature vector, or of a network's with so many taps. `num_features` is the length
    before the layers that some models have between the pooling and the classifier."""
    last = int(getattr(backbone, "head_hidden_size", None) or backbone.num_features)
    more = possible_taps(backbone, taps) - 1
    return last + more * backbone.embed_dim if more else last


def has_batchnorm(backbone: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in backbone.modules())


def require_no_batchnorm_on_ranks(backbone: nn.Module, name: str) -> None:
    """Refuse a backbone with BatchNorm on several ranks: each would normalise by its own share of the batch, and the
    result would depend on the number of ranks."""
    if world() > 1 and has_batchnorm(backbone):
        raise CdtransError(
            f"The backbone '{name}' has BatchNorm layers, whose statistics would differ between {world()} processes; "
            "start one process, or use a backbone without BatchNorm, such as deit_small or convnext_tiny."
        )
