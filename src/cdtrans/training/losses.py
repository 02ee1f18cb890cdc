"""The losses of both stages, each a function of logits."""

from torch import Tensor
from torch.nn import functional as F

from cdtrans.model.branches import Branches


def source_loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Stage 1: label-smoothed cross-entropy on the source."""
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Eq. 8 with the minus sign that the paper leaves out: cross-entropy of the student's probabilities p under the
    teacher's q, [B, K] twice -> scalar. Gradient flows through both unless the caller detaches the teacher."""
    return -(teacher.softmax(dim=1) * student.log_softmax(dim=1)).sum(dim=1).mean()


def adaptation_losses(
    out: Branches, source_labels: Tensor, target_labels: Tensor, detach_teacher: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Stage 2: source, target and distillation loss, all of weight 1."""
    teacher = out.source_target.logits
    return (
        F.cross_entropy(out.source.logits, source_labels),
        F.cross_entropy(out.target.logits, target_labels),
        distillation_loss(out.target.logits, teacher.detach() if detach_teacher else teacher),
    )
