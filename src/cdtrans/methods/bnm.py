"""BNM (Cui et al. 2020): the nuclear norm of a batch of target predictions is to be large.

    min  CE(source) - w / min(B, K) ||P||_*        ||P||_* = sum of the singular values of P, [B, K]

P has a row for each target image of the batch: its Frobenius norm is large for certain predictions, its rank for
predictions of many classes. The paper divides by B; this is the mean of the singular values, as in the authors' code.
`fast` is FBNM (Cui et al. 2021): the min(B, K) largest column norms of P take the place of the singular values, so that
a step needs no SVD and can be captured."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.base import Batch, Method, Sizes
from cdtrans.network.network import Network
from cdtrans.schema import option


class BNM(Method):
    """Certain and diverse predictions by the nuclear norm."""

    @dataclass(frozen=True)
    class Options:
        trade_off: float = option(1.0, "Weight w of the nuclear norm.", minimum=0)
        fast: bool = option(False, "FBNM: column norms in place of singular values.")

    options: Options
    paper = "Cui et al. 2020"
    title = (
        "Towards Discriminability and Diversity: Batch Nuclear-norm Maximization under Label Insufficient Situations, "
        "CVPR"
    )
    least_batch = 4  # with fewer images there is hardly a diversity to ask for

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        self.capturable = options.fast  # an SVD waits for the GPU

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        source, target = self.network.encode_each(batch.x_s, batch.x_t)
        p = target.logits.float().softmax(dim=1)  # [B, K]
        values = largest_column_norms(p) if self.options.fast else torch.linalg.svdvals(p)
        return {
            "loss_source": F.cross_entropy(source.logits, batch.y_s),
            "loss_nuclear": -self.options.trade_off * values.mean(),
        }


def largest_column_norms(p: Tensor) -> Tensor:
    """[B, K] -> [min(B, K)]: the singular values, if every prediction is certain."""
    norms: Tensor = torch.linalg.vector_norm(p, dim=0)
    return norms.topk(min(p.shape)).values
