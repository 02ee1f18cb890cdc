"""One pass over a domain."""

import numpy as np
import pytest
import torch
from timm.models import VisionTransformer

from cdtrans.data.batches import Images
from cdtrans.model.branches import CDTrans
from cdtrans.model.encoding import encode
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


@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_every_image_in_order_whatever_the_batch(model: CDTrans, batch: int) -> None:
    domain = images()
    out = encode(model, domain, batch=batch, screen=Screen(quiet=True), name="target")
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
    out = encode(model, images(), batch=2, screen=Screen(quiet=True), name="target")
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert not out.features.requires_grad


@pytest.mark.parametrize("device", devices())
def test_the_same_on_every_device_in_float32(model: CDTrans, device: str) -> None:
    on_cpu = encode(model, images(), batch=2, screen=Screen(quiet=True), name="target")
    model.to(device)
    here = encode(model, images(device), batch=2, screen=Screen(quiet=True), name="target")
    assert here.features.dtype == here.logits.dtype == torch.float32
    assert here.features.device.type == device
    torch.testing.assert_close(here.features.cpu(), on_cpu.features, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(here.logits.cpu(), on_cpu.logits, rtol=1e-3, atol=1e-2)
