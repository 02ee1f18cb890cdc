"""The losses of both stages, each a function of logits."""

import math
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from cdtrans.model.cross_attention import Branches


def source_loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Stage 1: label-smoothed cross-entropy on the source."""
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Eq. 8 with the minus sign that the paper leaves out: cross-entropy of the student's probabilities p under the
    teacher's q, [B, K] twice -> scalar. Gradient flows through both unless the caller detaches the teacher."""
    return -(teacher.softmax(dim=1) * student.log_softmax(dim=1)).sum(dim=1).mean()


class Terms(NamedTuple):
    """The loss of each branch (`cls`, `dtl`, `none`): the columns of the paper's Table 6, whose last row is CDTrans."""

    source: str = "cls"
    source_target: str = "dtl"
    target: str = "cls"

    def names(self) -> tuple[str, ...]:
        """What the log calls them, in the order of `adaptation_losses`."""
        used = {
            "loss_source": self.source == "cls",
            "loss_target": self.target == "cls",
            "loss_distillation": self.source_target == "dtl",
            "loss_source_target": self.source_target == "cls",
        }
        return tuple(name for name in used if used[name])


CDTRANS = Terms()


def rectified_loss(primary: Tensor, auxiliary: Tensor, labels: Tensor) -> Tensor:
    """RPLL (Zheng & Yang 2021): the cross-entropy of a prediction counts less where a second prediction of the same
    image differs from it, exp(-D) CE + D with D = KL(primary || auxiliary), [B, K] twice -> scalar. D itself keeps the
    two from differing everywhere."""
    log_p = primary.log_softmax(dim=1)
    variance = (log_p.exp() * (log_p - auxiliary.log_softmax(dim=1))).sum(dim=1)  # [B]
    return ((-variance).exp() * F.cross_entropy(primary, labels, reduction="none") + variance).mean()


def uniform_divergence(logits: Tensor) -> Tensor:
    """MRKLD (Zou et al. 2019): KL(uniform || prediction), [B, K] -> scalar, which a prediction pays for being sure."""
    return -logits.log_softmax(dim=1).mean() - math.log(logits.shape[1])


def adaptation_losses(
    out: Branches, source_labels: Tensor, target_labels: Tensor, detach_teacher: bool, terms: Terms = CDTRANS
) -> tuple[Tensor, ...]:
    """Stage 2: source, target and distillation loss, or those of them that are asked for, all of weight 1.

    In place of the distillation, `cls` classifies the source-target branch itself. Its two images count as one class,
    and of their two labels it gets the source's, which is true."""
    losses = []
    if terms.source == "cls":
        losses.append(F.cross_entropy(out.source.logits, source_labels))
    if terms.target == "cls":
        losses.append(F.cross_entropy(out.target.logits, target_labels))
    teacher = out.source_target.logits
    if terms.source_target == "dtl":
        losses.append(distillation_loss(out.target.logits, teacher.detach() if detach_teacher else teacher))
    elif terms.source_target == "cls":
        losses.append(F.cross_entropy(teacher, source_labels))
    return tuple(losses)
