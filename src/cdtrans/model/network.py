"""A backbone and a head: images -> features and logits."""

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

from cdtrans.model.cross_attention import Stream, embed, rows_read, run_block
from cdtrans.model.head import Head, MeanHead, Output


class Network(nn.Module):
    """What stage 1 trains, what every method adapts and what is served."""

    keep: Tensor  # [depth, 2] how often each block's attention and MLP is kept in training

    def __init__(self, backbone: VisionTransformer, head: Head | MeanHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        drops = [[getattr(d, "drop_prob", 0.0) for d in (b.drop_path1, b.drop_path2)] for b in backbone.blocks]
        self.drops_paths = any(map(any, drops))
        self.register_buffer("keep", 1 - torch.tensor(drops), persistent=False)

    def encode(self, images: Tensor) -> Output:
        """[B, 3, H, W] -> features and logits: timm's own forward, but for the last block's rows that nobody reads."""
        return self.head(self.features(images))  # type: ignore[no-any-return]

    def encode_each(self, *batches: Tensor) -> tuple[Output, ...]:
        """Several batches, [B, 3, H, W] each, in one pass of the backbone; the head sees them one by one."""
        features = self.features(torch.cat(batches))
        return tuple(self.head(feature) for feature in features.split([len(batch) for batch in batches]))

    def features(self, images: Tensor) -> Tensor:
        """The backbone's features, before the head: [B, 3, H, W] -> [B, D]."""
        return self.run_blocks(embed(self.backbone, images), cross=False)

    @property
    def dim(self) -> int:
        """D, the length of a feature."""
        return int(self.backbone.num_features)

    def run_blocks(self, x: Tensor, *, cross: bool) -> Tensor:
        """Tokens -> features: all blocks, the final norm and the backbone's own pooling, [B, N, D] -> [B, D]."""
        vit = self.backbone
        scales = self.drop_path_scales(x)
        stream = Stream(x)
        with torch.cuda.device_of(x):  # kernels are launched on the current one
            for i, block in enumerate(vit.blocks):
                rows = rows_read(vit) if i + 1 == len(vit.blocks) else None
                stream = run_block(block, stream, scales[i] if scales is not None else None, rows=rows, cross=cross)
        return vit.forward_head(vit.norm(stream.sum()), pre_logits=True)  # type: ignore[no-any-return]

    def drop_path_scales(self, x: Tensor) -> Tensor | None:
        """Stochastic depth for a whole pass: what each block's attention and MLP counts for in each image, 0 or the
        inverse of its chance to be kept, [depth, 2, B]. One draw instead of two in every block."""
        if not (self.training and self.drops_paths):
            return None
        keep = self.keep[:, :, None].to(x.dtype)
        drawn = torch.rand(*self.keep.shape, len(x), dtype=x.dtype, device=x.device)
        return (drawn < keep) / keep
