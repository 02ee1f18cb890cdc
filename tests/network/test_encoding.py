"""One pass over a domain."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from timm.models import VisionTransformer

from cdtrans.config import make_config
from cdtrans.inputs.batches import Images
from cdtrans.network.encoding import Encoded, Encoder
from cdtrans.network.network import Head, Network
from cdtrans.runtime.screen import Screen
from support import devices, error_says, raises, says, small_gpu


@pytest.fixture
def model() -> Network:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0)
    model = Network(vit, Head(16, 3, "batchnorm"))
    model.head.classifier.weight.data.mul_(1000)  # logits that tell images apart
    return model


def images(device: str = "cpu") -> Images:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 18, 18, 3), np.uint8)
    rows = np.array([6, 0, 1, 5, 2])
    return Images(pixels, rows, crop=16, mean=(0.5,) * 3, std=(0.5,) * 3, device=torch.device(device))


def encoded(model: Network, domain: Images, **settings) -> Encoded:
    config = make_config({"precision": "fp32", "encode_batch": 2}, settings)
    return Encoder(model, config, Screen(quiet=True))(domain, "target")


@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_every_image_in_order_whatever_the_batch(model: Network, batch: int) -> None:
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


def test_a_model_in_training_is_encoded_in_eval_mode_and_not_changed(model: Network) -> None:
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    out = encoded(model, images())
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert not out.features.requires_grad


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-3), ("bf16", 0.1)])
def test_the_same_in_float32_on_every_device(model: Network, device: str, precision: str, error: float) -> None:
    on_cpu = encoded(model, images())
    here = encoded(model.to(device), images(device), precision=precision)
    assert here.features.dtype == here.logits.dtype == torch.float32
    assert here.features.device.type == device
    torch.testing.assert_close(here.features.cpu(), on_cpu.features, rtol=error, atol=error)
    torch.testing.assert_close(here.logits.cpu(), on_cpu.logits, rtol=error, atol=10 * error)
    assert precision == "fp32" or not torch.equal(here.features.cpu(), on_cpu.features)


def test_scores_that_are_not_finite_are_an_error(model: Network) -> None:
    model.head.classifier.weight.data[0, 0] = torch.inf
    with error_says("target images", "not finite", "training has diverged"):
        encoded(model, images())


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_with_too_little_memory_batches_are_halved_once_for_all_passes(
    model: Network, frozen: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = encoded(model, images())
    calls = small_gpu(monkeypatch, 1)
    config = make_config({"precision": "fp32", "encode_batch": 64})
    encoder = Encoder(model, config, Screen(), {} if frozen else None)
    encoder.graph = lambda x: pytest.fail("of the old size")  # type: ignore[assignment]
    out = encoder(images(), "target")
    assert encoder.graph is None
    torch.testing.assert_close(out, whole)
    assert sorted(set(calls)) == [1, 2, 5], "five images, then batches of two, then single ones"
    first, second = capsys.readouterr().out.splitlines()
    assert says(first, "too little memory", "encode 5 images", "2 at a time")
    assert says(second, "too little memory", "encode 2 images", "1 at a time")
    calls.clear()
    torch.testing.assert_close(encoder(images(), "source"), whole)
    assert set(calls) == {1}
    assert capsys.readouterr().out == ""


def test_an_image_that_does_not_fit_is_an_error(model: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    small_gpu(monkeypatch, 0)
    with raises("gpu-memory"):
        encoded(model, images())


class TestCaptured:
    """On a CPU, with a function in the graph's place."""

    @staticmethod
    def encoder(model: Network, captured: Callable) -> tuple[Encoder, Encoded]:
        encoder = Encoder(model, make_config({"precision": "fp32", "encode_batch": 2}), Screen(quiet=True))
        plain = encoder(images(), "target")
        encoder.graph, encoder.capturable = captured, True  # type: ignore[assignment]
        return encoder, plain

    def test_every_batch_has_one_shape_and_every_image_its_own_features(self, model: Network) -> None:
        shapes = []
        encoder, plain = self.encoder(model, lambda x: (shapes.append(x.shape), model.encode(x))[1])
        out = encoder(images(), "target")
        assert shapes == [(2, 3, 16, 16)] * 3, "five images in batches of two"
        torch.testing.assert_close(out.features, plain.features)
        torch.testing.assert_close(out.logits, plain.logits)

    def test_a_gpu_that_cannot_capture_encodes_without(
        self, model: Network, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def broken(x: torch.Tensor) -> None:
            raise RuntimeError("out of memory")

        encoder, plain = self.encoder(model, broken)
        out, again = encoder(images(), "target"), encoder(images(), "target")
        assert capsys.readouterr().err.count("could not be made faster") == 1
        assert encoder.failed, "it is not tried again"
        torch.testing.assert_close(out.features, plain.features)
        torch.testing.assert_close(again.features, plain.features)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_on_a_gpu_it_is_the_same_and_follows_the_weights(model: Network, precision: str) -> None:
    model.cuda()
    config = make_config({"precision": precision, "encode_batch": 2, "compile": "graph"})
    encoder = Encoder(model, config, Screen(quiet=True))
    first = encoder(images("cuda"), "target")
    again = encoder(images("cuda"), "target")
    assert encoder.graph is not None
    torch.testing.assert_close(again, first, rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.mul_(0.7)
    changed = encoder(images("cuda"), "target")
    plain = encoded(model, images("cuda"), precision=precision, compile="off")
    torch.testing.assert_close(changed, plain, rtol=1e-2, atol=1e-2)
    assert not torch.allclose(changed.features, first.features, rtol=1e-2, atol=1e-2)
