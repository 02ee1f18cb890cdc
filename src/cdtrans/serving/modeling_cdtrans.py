"""A classifier of cdtrans for transformers, which runs this file only with `trust_remote_code=True`. Part of cdtrans
(Apache-2.0), which copies this file into hub folders: it imports nothing of cdtrans."""

from torch import Tensor
from transformers import (
    AutoImageProcessor,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    TimmWrapperImageProcessor,
)
from transformers.modeling_outputs import ImageClassifierOutput

from .tapped_vit import tapped_logits, widen_head


class CdtransConfig(TimmWrapperConfig):
    """A timm model, and how many of its last blocks the head reads."""

    model_type = "cdtrans"
    taps: int = 1


class CdtransForImageClassification(TimmWrapperForImageClassification):
    config_class = CdtransConfig

    def __init__(self, config: CdtransConfig) -> None:
        super().__init__(config)
        widen_head(self.timm_model, config.taps)

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, return_dict: bool | None = None
    ) -> ImageClassifierOutput | tuple[Tensor, ...]:
        logits = tapped_logits(self.timm_model, pixel_values.to(self.device, self.dtype), self.config.taps)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        output = ImageClassifierOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output


AutoImageProcessor.register(CdtransConfig, slow_image_processor_class=TimmWrapperImageProcessor, exist_ok=True)
