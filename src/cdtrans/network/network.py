"""The network: a backbone and a head. Images -> features and logits."""

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cdtrans.errors import SettingsError
from cdtrans.network.blocks import (
    AttentionStep,
    Tokens,
    Transferability,
    embed,
    initialise,
    possible_taps,
    run_blocks,
    self_attention,
    why_no_shared_attention,
)
from cdtrans.network.operations import Residual, Stream
from cdtrans.runtime.ranks import gather, rank, world

CLASSIFIER_STD = 0.001  # the authors' initialisation
MLP_STD = 0.01  # as MCD's and SAFN's authors start
CORRECTION_STD, CORRECTION_BIAS = 0.005, 0.1  # as DCAN's authors start


class Output(NamedTuple):
    """The head's output for a batch: the feature that pairs are searched with, and the class scores."""

    feature: Tensor  # [B, D], after the bottleneck norm
    logits: Tensor  # [B, K]


class AnyHead(nn.Module):
    """The base of all heads. On several ranks a head is trained on the features of all of them."""

    spec: dict[str, Any]  # its description in a model card, for `build_head`

    def forward(self, feature: Tensor) -> Output:
        return self.classify(gather(feature) if self.training else feature)

    def classify(self, feature: Tensor) -> Output:
        """Features of all ranks, [B, D] -> feature and logits."""
        raise NotImplementedError

    def of_another_domain(self, out: Output) -> Output:
        """The output for a whole other domain, [N, D] and [N, K]. A head that standardises by the target's statistics
        takes that domain's own."""
        return out


class Head(AnyHead):
    """The authors' head and its simpler forms.
    `neck="batchnorm"`: BatchNorm with its bias frozen at 0, then a linear layer without bias (docs/method.md 1.3).
    `neck="none"`: a plain linear layer on the backbone's feature.
    `neck="standardise"`: each feature standardised by its mean and deviation, then a linear layer: a probe."""

    def __init__(self, dim: int, classes: int, neck: str) -> None:
        super().__init__()
        self.spec = {"neck": neck} if neck == "standardise" else {}  # the card says the others
        self.neck: nn.Module = nn.Identity()
        if neck == "batchnorm":
            self.neck = nn.BatchNorm1d(dim)
            self.neck.bias.requires_grad_(False)
        elif neck == "standardise":
            self.neck = nn.BatchNorm1d(dim, affine=False)
        self.classifier = nn.Linear(dim, classes, bias=neck != "batchnorm")
        nn.init.normal_(self.classifier.weight, std=CLASSIFIER_STD)
        if self.classifier.bias is not None:
            nn.init.zeros_(self.classifier.bias)

    def classify(self, feature: Tensor) -> Output:
        feature = self.neck(feature)
        return Output(feature, self.classifier(feature))

    def of_another_domain(self, out: Output) -> Output:
        if self.spec.get("neck") != "standardise":
            return out
        mean, variance = out.feature.mean(dim=0), out.feature.var(dim=0, correction=0)
        feature = (out.feature - mean) / (variance + 1e-5).sqrt()
        logits = self.classifier(feature.to(self.classifier.weight.device))  # encoded images of a Mac are on the CPU
        return Output(feature, logits.to(feature.device))


class MeanHead(AnyHead):
    """Several classifiers of the same feature, whose logits are averaged (MCD). Each is an MLP of two hidden layers:
    Dropout, Linear, BatchNorm, ReLU, twice, then Linear."""

    def __init__(self, dim: int, classes: int, *, heads: int, hidden: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.spec = {"heads": heads, "hidden": hidden}

        def layer(inputs: int) -> list[nn.Module]:
            return [nn.Dropout(dropout), nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU()]

        self.heads = nn.ModuleList(
            nn.Sequential(*layer(dim), *layer(hidden), nn.Linear(hidden, classes)) for _ in range(heads)
        )
        initialise(self, partial(nn.init.normal_, std=MLP_STD))

    def each(self, feature: Tensor) -> list[Tensor]:
        """The logits of every classifier, [B, K] each."""
        return [head(feature) for head in self.heads]

    def classify(self, feature: Tensor) -> Output:
        return Output(feature, torch.stack(self.each(feature)).mean(dim=0))


class BottleneckHead(AnyHead):
    """A block of Linear, BatchNorm, ReLU and Dropout, then a linear layer (SAFN). Its feature is that of the block;
    Dropout keeps the mean of its squared length."""

    def __init__(self, dim: int, classes: int, *, bottleneck: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.spec = {"bottleneck": bottleneck}
        self.block = nn.Sequential(nn.Linear(dim, bottleneck), nn.BatchNorm1d(bottleneck), nn.ReLU())
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(bottleneck, classes)
        initialise(self, partial(nn.init.normal_, std=MLP_STD))

    def classify(self, feature: Tensor) -> Output:
        feature = self.block(feature)
        if self.training:
            feature = self.dropout(feature) * math.sqrt(1 - self.dropout.p)
        return Output(feature, self.classifier(feature))


class CorrectedHead(AnyHead):
    """A head whose feature and logits are both corrected by an MLP of theirs (DCAN): f + D(f), then z + D'(z)."""

    def __init__(self, dim: int, classes: int, neck: str, *, correction: int) -> None:
        super().__init__()
        self.spec = {"correction": correction}
        self.plain = Head(dim, classes, neck)
        self.of_feature = Correction(dim, correction)
        self.of_logits = Correction(classes, classes)

    def classify(self, feature: Tensor) -> Output:
        return self.correct(self.plain.classify(feature))

    def correct(self, out: Output) -> Output:
        """The corrected form of what the plain head says."""
        feature = out.feature + self.of_feature(out.feature)
        logits = self.plain.classifier(feature)
        return Output(feature, logits + self.of_logits(logits))


class Correction(nn.Sequential):
    """[B, D] -> [B, D], small at first."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        initialise(self, partial(nn.init.normal_, std=CORRECTION_STD), CORRECTION_BIAS)


def build_head(spec: dict[str, Any], dim: int, classes: int, neck: str) -> AnyHead:
    """The head that a model card describes: `spec` is empty for a head of the run's --neck."""
    if "heads" in spec:
        return MeanHead(dim, classes, **spec)
    if "bottleneck" in spec:
        return BottleneckHead(dim, classes, **spec)
    if "correction" in spec:
        return CorrectedHead(dim, classes, neck, **spec)
    return Head(dim, classes, spec.get("neck", neck))


class Network(nn.Module):
    """Any timm model that gives one feature vector (created with num_classes=0), and a head. Stage 1 trains a network,
    every method adapts it, and it is served.

    ViTs are run by `cdtrans.network.blocks`, with kernels on a GPU; all other models by timm's own forward. With `taps`
    the feature of a ViT is that of its last blocks side by side: a probe on a frozen backbone gains by it. With
    `transferability` the class token weighs the patches in the last block (TVT).

    BatchNorm layers of the backbone normalise a training batch as it comes: in stage 1 source images, in stage 2 source
    and target together (`encode_each`), as tllib does.

    Where memory is short (`compute_in_parts`), the backbone computes a batch in parts, and the backward pass computes
    each part again instead of keeping its intermediate results. The head and the losses still get the whole batch."""

    backbone: Any  # timm's models have no type in common
    keep: Tensor  # [depth, 2] chance of each block's attention and MLP to be kept in training

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
        """Train in this number of parts from now on; with `recompute_blocks` the backward pass of a part also computes
        each block again by itself. Not for a backbone with BatchNorm, which needs the whole batch."""
        self.parts, self.recompute_blocks = parts, recompute_blocks
        if not self.runs_blocks:
            with suppress(AttributeError, AssertionError):  # not every timm model can
                self.backbone.set_grad_checkpointing(recompute_blocks)

    def encode(self, images: Tensor) -> Output:
        """[B, 3, H, W] -> features and logits."""
        return self.head(self.features(images))  # type: ignore[no-any-return]

    @torch.no_grad()
    def encode_in_eval_mode(self, images: Tensor) -> Output:
        """The same within a training step, without gradients and without a trace in running statistics."""
        self.eval()
        out = self.encode(images)
        self.train()
        return out

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

    def features(
        self, images: Tensor, sizes: list[int] | None = None, attention: AttentionStep | None = None
    ) -> Tensor:
        """The backbone's features, before the head: [B, 3, H, W] -> [B, D]. `sizes` are those of several batches."""
        if not self.runs_blocks:  # no len() here, which would fix the batch size of an exported graph
            return self._in_parts(lambda x, _: self.backbone(x), images, None)
        tokens = embed(self.backbone, images)
        return self.run_blocks(tokens, self.drop_path_scales(tokens.x, sizes), attention or self.attention)

    def features_each(self, *batches: Tensor, attention: AttentionStep | None = None) -> tuple[Tensor, ...]:
        """The features of several batches, [B, D] each, in one pass."""
        sizes = [len(batch) for batch in batches]
        return torch.split(self.features(torch.cat(batches), sizes, attention), sizes)  # type: ignore[no-any-return]

    def attention(self, block: Any, stream: Stream, rope: Tensor | None, rows: int | None) -> tuple[Tensor, Residual]:
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
        """The length of the last two blocks' part of a feature."""
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
        raise SettingsError(
            "batchnorm-on-ranks",
            f"The backbone '{name}' has BatchNorm layers, whose statistics would differ between {world()} processes; "
            "start one process, or use a backbone without BatchNorm, such as deit_small or convnext_tiny.",
        )


class PerDomain(nn.Module):
    """Two layers, one for each domain."""

    def __init__(self, source: nn.Module, target: nn.Module) -> None:
        super().__init__()
        self.source, self.target = source, target

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.target(x)  # type: ignore[no-any-return]
        source, target = x.chunk(2)
        return torch.cat([self.source(source), self.target(target)])


def with_layers(network: Network, kind: type[nn.Module], make: Callable[[nn.Module], nn.Module]) -> Network:
    """The network with each layer of a kind in its backbone replaced by `make`. All other weights, and the head, are
    the same tensors in both."""
    backbone = network.backbone
    shared = [*backbone.parameters(), *backbone.buffers()]
    copied = {id(x): x for x in shared} | {id(x): make(x) for x in backbone.modules() if isinstance(x, kind)}
    return Network(copy.deepcopy(backbone, copied), network.head, network.taps)
