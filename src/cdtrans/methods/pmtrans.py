"""PMTrans (Zhu et al. 2023): an intermediate domain of images whose patches are mixed from source and target.

A source image s and a target image t give a mixed one: its patch n is l_n s_n + (1 - l_n) t_n, with 1 - l_n drawn from
Beta(a, b) for each patch, where a and b are learnt. Its share of source is l = mean of l_n. With the features f, the
cosines C_s = cos(f_m, f_s) and C_t = cos(f_m, f_t) in a batch of B pairs, and the target's labels y_t and their weights
w by ATDOC-NA's memory bank,

    L_feature = 1/B sum_i [ -l_i sum_{j: y_j = y_i} log softmax_j(C_s)_ij - (1 - l_i) log softmax_j(C_t)_ii ]
    L_label   = 1/B [ sum_i l_i CE(z_i, y_i) + L sum_i w_i (1 - l_i) CE(z_i, y_t,i) / sum_i w_i (1 - l_i) ]
    min over network, a, b, u, v of  CE(source) + softplus(u) L_feature + softplus(v) L_label

with L = sum_i (1 - l_i) and z the logits of the mixed images. The paper has a game in which the mixture works against
the network; in the authors' code, and here, everything is minimised. Not taken: weights of the patches in l by the
attention of the class token, which change l by 0.0001, and their head: f is the feature after the bottleneck norm."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Beta
from torch.nn import functional as F

from cdtrans.methods.atdoc_na import MemoryBank
from cdtrans.methods.base import Batch, Method, Sizes
from cdtrans.network.blocks import embed, self_attention
from cdtrans.network.network import Network
from cdtrans.runtime.ranks import rank, world
from cdtrans.schema import option


class PMTrans(Method):
    """Images mixed of source and target, patch by patch."""

    @dataclass(frozen=True)
    class Options:
        neighbours: int = option(5, "Entries of the memory bank that vote on a target label.", minimum=1)
        label_smoothing: float = option(0.1, "Label smoothing on the source.", minimum=0, maximum=0.99)
        weight: float = option(-2.0, "The weights of both losses on mixed images are softplus of this at first.")

    options: Options
    paper = "Zhu et al. 2023"
    title = "Patch-Mix Transformer for Unsupervised Domain Adaptation: A Game Perspective, CVPR"
    backbones = "ViT"

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        self.bank = MemoryBank(sizes, network.dim, options.neighbours)
        self.mixture = nn.Parameter(torch.ones(2))  # a and b, before the softplus
        self.weights = nn.Parameter(torch.full((2,), options.weight))  # u and v

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        features, share = self.features(batch.x_s, batch.x_t)
        source, mixed, target = (self.network.head(f) for f in features)
        labels, weights = self.bank.vote(target.feature.detach(), batch.i_t)
        of_features, of_labels = F.softplus(self.weights)
        in_features = feature_loss(mixed.feature, source.feature, target.feature, batch.y_s, share)
        in_labels = label_loss(mixed.logits.float(), batch.y_s, labels, weights, share)
        smoothing = self.options.label_smoothing
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s, label_smoothing=smoothing),
            "loss_features": of_features * in_features,
            "loss_labels": of_labels * in_labels,
        }

    def features(self, x_s: Tensor, x_t: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Those of source, mixed and target images, [B, D] each, in one pass, and the share of source, [B] of all
        ranks. Class tokens and position embeddings of both images are equal, so all tokens may be mixed alike; of a
        ViT with a norm before its blocks, such as CLIP's, after that norm."""
        network = self.network
        tokens = embed(network.backbone, torch.cat([x_s, x_t]))
        source, target = tokens.x.chunk(2)
        prefix = network.backbone.num_prefix_tokens
        drawn = self.draw(world() * len(x_s), source.shape[1] - prefix)
        mine = F.pad(drawn.chunk(world())[rank()], (prefix, 0), value=1.0)[:, :, None].to(source.dtype)  # [B, N, 1]
        x = torch.cat([source, mine * source + (1 - mine) * target, target])
        sizes = [len(x_s)] * 3
        features = network.run_blocks(tokens._replace(x=x), network.drop_path_scales(x, sizes), self_attention)
        return features.split(sizes), drawn.mean(dim=1)

    def draw(self, images: int, patches: int) -> Tensor:
        """l_n for so many images and patches. The gradient reaches a and b through the draw."""
        a, b = F.softplus(self.mixture)
        return 1 - Beta(a, b, validate_args=False).rsample((images, patches))

    def after_step(self, batch: Batch, progress: Tensor) -> None:
        self.bank.remember(self.network, batch)


def feature_loss(mixed: Tensor, source: Tensor, target: Tensor, labels: Tensor, share: Tensor) -> Tensor:
    """Mixed images are near their target image, and near source images of their source's class, by their shares:
    features [B, D] three times, [B] twice -> scalar."""
    mixed, source, target = (F.normalize(x.float(), dim=1) for x in (mixed, source, target))
    same_class = (labels[:, None] == labels[None]).float()  # [B, B]
    near_source = -(same_class * (mixed @ source.T).log_softmax(dim=1)).sum(dim=1)  # [B]
    near_target = -(mixed @ target.T).log_softmax(dim=1).diagonal()
    return (share * near_source + (1 - share) * near_target).mean()


def label_loss(logits: Tensor, y_s: Tensor, y_t: Tensor, weights: Tensor, share: Tensor) -> Tensor:
    """Mixed images have both labels, by their shares, and the target's by its weight too: [B, K], then [B] each."""
    of_source = (share * F.cross_entropy(logits, y_s, reduction="none")).sum()
    of_target = (1 - share) * weights  # [B]
    errors = (of_target * F.cross_entropy(logits, y_t, reduction="none")).sum() / of_target.sum().detach()
    return (of_source + errors * (1 - share).sum()) / len(logits)
