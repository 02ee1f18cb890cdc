"""RPLL (Zheng & Yang 2021): pseudo-labels whose loss counts less where two predictions of an image differ.

    exp(-D) CE(p, y) + D,   D = KL(q || p)

for the trained prediction p and another one q (as in the authors' code; the paper writes KL(p || q)), and the network's
own prediction as the label y. The paper's Table 5 "reproduces their pseudo-label generations" on its own baseline, so
everything else is that of CDTrans: source and target images meet at random, and no attention crosses between them.

Not taken: their adversarial stage 1, and the auxiliary classifier that makes q. A ViT has none, so both predictions are
of the one classifier, in two draws of stochastic depth; with --drop-path 0 plain pseudo-labels are left."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method, Round
from cdtrans.pairing.pairs import Domains, Proposals


class RPLL(Method):
    """Uncertainty-rectified self-training."""

    paper = "Zheng & Yang 2021"
    title = "Rectifying Pseudo Label Learning via Uncertainty Estimation, IJCV"

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        p = domains.target.logits.softmax(dim=1)  # [Nt, K]
        labels = F.one_hot(p.argmax(dim=1), p.shape[1]).to(p)
        return Proposals.at_random(domains, torch.arange(len(p)), labels, generator, coupled=True)

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        source, auxiliary, primary = self.network.encode_each(batch.x_s, batch.x_t, batch.x_t)
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s),
            "loss_target": rectified_loss(primary.logits, auxiliary.logits, batch.y_t),
        }


def rectified_loss(primary: Tensor, auxiliary: Tensor, labels: Tensor) -> Tensor:
    """exp(-D) CE + D with D = KL(auxiliary || primary), [B, K] twice -> scalar: the cross-entropy of a prediction
    counts less where a second prediction of the same image differs, and D itself keeps them from differing always."""
    log_q = auxiliary.log_softmax(dim=1)
    variance = (log_q.exp() * (log_q - primary.log_softmax(dim=1))).sum(dim=1)  # [B]
    return ((-variance).exp() * F.cross_entropy(primary, labels, reduction="none") + variance).mean()
