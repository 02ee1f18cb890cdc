"""RPLL (Zheng & Yang 2021): pseudo-labels whose loss counts less where two predictions of an image differ.

The paper's Table 5 "reproduces their pseudo-label generations" on its own baseline and says no more. So here network,
source-only start, optimiser and schedule are those of CDTrans, and the method decides which target images are trained
on, with which labels, by which loss. Source and target images meet at random, and no attention crosses between them.

Taken from the paper: every target image has the network's own prediction as its label; the rectified loss,

    exp(-D) CE(p, y) + D,   D = KL(q || p)

for the trained prediction p and the other one q. The paper writes KL(p || q); the published numbers come from the
authors' code, which has KL(q || p), and so has this. Not taken: their stage 1 (adversarial, with memory
regularisation), and the auxiliary classifier that makes the second prediction. A ViT has none, so both predictions are
of the one classifier, in two draws of stochastic depth. With --drop-path 0 they agree, and plain pseudo-labels are
left. The code's second loss, of the auxiliary classifier with half the weight, would be the same one again with two
draws of the same classifier, and is left out."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method, Round
from cdtrans.pairing.pairs import Domains, Proposals


class RPLL(Method):
    """Uncertainty-rectified self-training."""

    paper = "Zheng & Yang 2021"
    title = "Rectifying Pseudo Label Learning via Uncertainty Estimation, IJCV"
    cost = "1.1"

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
