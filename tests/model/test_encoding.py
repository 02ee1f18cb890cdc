"""One pass over a domain."""

import numpy as np
import pytest
import torch
from timm.models import VisionTransformer

from cdtrans.config import make_config
from cdtrans.data.batches import Images
from cdtrans.errors import CdtransError
from cdtrans.model.branches import CDTrans
from cdtrans.model.encoding import Encoded, encode
from cdtrans.model.head import Head
from cdtrans.screen import Screen
from support import devices


@pytest.fixture
def model() -> CDTrans:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0)
    model = CDTrans(vit, Head(16, 3, "batchnorm"))
    model.head.classifier.weight.data.mul_(1000)  # logits that tell images apart
    return model


def images(device: str = "cpu") -> Images:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 18, 18, 3), np.uint8)
    rows = np.array([6, 0, 1, 5, 2])
    return Images(pixels, rows, crop=16, mean=(0.5,) * 3, std=(0.5,) * 3, device=torch.device(device))


def encoded(model: CDTrans, domain: Images, **settings) -> Encoded:
    config = make_config({"precision": "fp32", "encode_batch": 2}, settings)
    return encode(model, domain, config, Screen(quiet=True), "target")


@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_every_image_in_order_whatever_the_batch(model: CDTrans, batch: int) -> None:
    domain = images()
    out = encoded(model, domain, encode_batch=batch)
    assert out.features.shape == (5, 16)
    assert out.logits.shape == (5, 3)
    with torch.no_grad():
        for n in range(5):
            alone = model.encode(domain.centred(torch.tensor([n])))
            torch.testing.assert_close(out.features[n], alone.feature[0])
            torch.testing.assert_close(out.logits[n], alone.logits[0])
    assert out.features.unique(dim=0).shape[0] == 5


def test_a_model_in_training_is_encoded_in_eval_mode_and_not_changed(model: CDTrans) -> None:
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    out = encoded(model, images())
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert not out.features.requires_grad


@pytest.mark.parametrize("device", devices())
def test_the_same_on_every_device(model: CDTrans, device: str) -> None:
    on_cpu = encoded(model, images())
    model.to(device)
    here = encoded(model, images(device))
    assert here.features.dtype == here.logits.dtype == torch.float32
    assert here.features.device.type == device
    torch.testing.assert_close(here.features.cpu(), on_cpu.features, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(here.logits.cpu(), on_cpu.logits, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("device", devices())
def test_bf16_is_used_inside_and_float32_comes_out(model: CDTrans, device: str) -> None:
    full = encoded(model.to(device), images(device))
    half = encoded(model, images(device), precision="bf16")
    assert half.features.dtype == half.logits.dtype == torch.float32
    assert not torch.equal(half.features, full.features)
    torch.testing.assert_close(half.features, full.features, rtol=0.1, atol=0.1)


def test_scores_that_are_not_finite_are_an_error(model: CDTrans) -> None:
    model.head.classifier.weight.data[0, 0] = torch.inf
    with pytest.raises(CdtransError, match="target images are not finite: training has diverged"):
        encoded(model, images())
