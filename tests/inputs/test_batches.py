"""From decoded pixels to model input."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

import cdtrans.inputs.batches as batches
from cdtrans.inputs.batches import GREY, MASK_SQUARES, MASKED, Augmentation, EpochBatches, Images, masked, strong
from cdtrans.inputs.images import resized
from cdtrans.inputs.stream import StreamedPixels
from support import devices, raises

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RESIZE, CROP = 12, 8
ROOM = RESIZE - CROP + 1


def coordinates(device: str = "cpu", rows: tuple[int, ...] = (0, 1, 2)) -> Images:
    """Images whose every pixel says where it is from: (row in the image, column, number of the image)."""
    pixels = np.zeros((3, RESIZE, RESIZE, 3), np.uint8)
    pixels[..., 0] = np.arange(RESIZE)[None, :, None]
    pixels[..., 1] = np.arange(RESIZE)[None, None, :]
    pixels[..., 2] = np.arange(3)[:, None, None]
    nothing = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    return Images(pixels, np.array(rows), crop=CROP, device=torch.device(device), **nothing)


def drawn(images: Images, count: int, flip: float = 0.5, seed: int = 0) -> Augmentation:
    return images.draw(count, flip, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("device", devices())
def test_the_test_transform_is_the_authors(golden, device: str) -> None:
    g = golden("val_transform")
    pixels = resized(Image.fromarray(g["image_uint8"].numpy()), 256)[None]
    images = Images(pixels, np.array([0]), crop=224, mean=MEAN, std=STD, device=torch.device(device))
    out = images.centred(torch.tensor([0], device=images.rows.device))
    assert out.shape == (1, 3, 224, 224)
    assert out.dtype == torch.float32
    assert out.device.type == device
    torch.testing.assert_close(out[0].cpu(), g["output"], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("resize", "crop"), [(256, 224), (32, 28), (19, 16), (17, 16), (18, 15), (20, 20)])
def test_the_test_transform_is_torchvisions(resize: int, crop: int) -> None:
    """Two centre crops may differ by a pixel if the margin is odd."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 61, 3), np.uint8))
    steps = [transforms.Resize((resize, resize)), transforms.CenterCrop(crop)]
    theirs = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])(image)
    pixels, device = resized(image, resize)[None], torch.device("cpu")
    ours = Images(pixels, np.array([0]), crop=crop, mean=MEAN, std=STD, device=device)
    assert not drawn(ours, 9).top.any() or resize > crop
    torch.testing.assert_close(ours.centred(torch.tensor([0]))[0], theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("device", devices())
def test_every_augmented_image_is_a_crop_or_a_mirrored_crop(device: str) -> None:
    images = coordinates(device, rows=(2, 0, 1))
    indices = torch.arange(3).repeat(40)
    draws = drawn(images, len(indices))
    out = images.augmented(indices.to(images.rows.device), draws).mul(255).round().int().cpu()  # [B, 3, crop, crop]
    span = torch.arange(CROP, dtype=torch.int32)
    for n, image in enumerate(out):
        top, left, flip = int(draws.top[n]), int(draws.left[n]), bool(draws.flip[n])
        assert (image[0] == (top + span)[:, None]).all(), "rows as they are, from the top drawn"
        across = left + (span.flip(0) if flip else span)
        assert (image[1] == across[None, :]).all(), "columns from the left drawn, mirrored or not"
        assert (image[2] == (2, 0, 1)[n % 3]).all(), "the image that was asked for"
    assert 0 < draws.flip.sum() < len(indices)


def test_crops_are_uniform_and_flips_do_not_depend_on_them() -> None:
    """Chi-square over the 5 x 5 x 2 outcomes: 49 degrees of freedom exceed 85.4 once in a thousand."""
    draws = drawn(coordinates(), 25_000)
    outcome = (draws.top * ROOM + draws.left) * 2 + draws.flip
    counts = torch.bincount(outcome, minlength=ROOM * ROOM * 2).double()
    assert len(counts) == ROOM * ROOM * 2
    expected = 25_000 / len(counts)
    assert float(((counts - expected) ** 2 / expected).sum()) < 85.4


@pytest.mark.parametrize(("flip", "low", "high"), [(0.0, 0, 0), (1.0, 10_000, 10_000), (0.2, 1_870, 2_130)])
def test_the_share_of_flips_is_the_one_asked_for(flip: float, low: int, high: int) -> None:
    assert low <= int(drawn(coordinates(), 10_000, flip).flip.sum()) <= high


def test_the_same_draws_give_the_same_pixels_and_a_slice_its_part() -> None:
    images, indices = coordinates(), torch.tensor([0, 1, 2, 2, 1, 0, 0, 1])
    whole = images.augmented(indices, drawn(images, 8, seed=3))
    assert torch.equal(whole, images.augmented(indices, drawn(images, 8, seed=3)))
    assert not torch.equal(whole, images.augmented(indices, drawn(images, 8, seed=4)))
    part = slice(3, 6)
    crops = Augmentation(*(column[part] for column in drawn(images, 8, seed=3)))
    assert torch.equal(whole[part], images.augmented(indices[part], crops))


def test_a_selection_shares_the_pixels_and_leaves_the_others_alone() -> None:
    images = coordinates(rows=(0, 1))
    held = images.select(np.array([2]))
    assert held.pixels is images.pixels
    assert (len(images), len(held)) == (2, 1)
    (batch,) = held.in_order(4)
    assert (batch[0, 2] * 255).round().unique().tolist() == [2], "the third image"


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_the_domain_in_order_in_batches(batch: int) -> None:
    images = coordinates(rows=(2, 2, 0, 1, 0))
    parts = list(images.in_order(batch))
    assert [len(p) for p in parts] == [min(batch, 5 - start) for start in range(0, 5, batch)]
    assert torch.cat(parts)[:, 2, 0, 0].mul(255).round().tolist() == [2, 2, 0, 1, 0]
    assert len(images) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("share", [0.0, 0.4], ids=["in host memory", "resident"])
def test_a_gpu_sees_what_the_cpu_sees(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "RESIDENT_SHARE", share)
    cpu, gpu, indices = coordinates(), coordinates("cuda"), torch.tensor([2, 0, 1, 1])
    assert gpu.pixels.device.type == ("cuda" if share else "cpu")
    on_cpu = cpu.augmented(indices, drawn(cpu, 4))
    on_gpu = gpu.augmented(indices.to(gpu.rows.device), drawn(gpu, 4))
    assert on_gpu.device.type == "cuda"
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=0, atol=1e-6)


class TestEpochBatches:
    BATCHES = (slice(0, 3), slice(3, 6), slice(6, 7))

    def images(self, tmp_path: Path, streamed: bool) -> Images:
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (7, 18, 18, 3), dtype=np.uint8)
        files = []
        for n, image in enumerate(pixels):
            files.append(tmp_path / f"{n}.png")
            Image.fromarray(image).save(files[-1])
        where = StreamedPixels(files, 18) if streamed else pixels
        return Images(where, np.arange(7), crop=16, mean=MEAN, std=STD, device=torch.device("cpu"))

    def plan(self, images: Images) -> EpochBatches:
        order = torch.tensor([5, 0, 3, 6, 1, 2, 4])
        return images.plan(order, list(self.BATCHES), 0.5, torch.Generator().manual_seed(3))

    def test_batches_are_the_augmented_images_in_order(self, tmp_path: Path) -> None:
        images = self.images(tmp_path, streamed=False)
        plan = self.plan(images)
        crops = images.draw(7, 0.5, torch.Generator().manual_seed(3))
        whole = images.augmented(torch.tensor([5, 0, 3, 6, 1, 2, 4]), crops)
        assert torch.equal(torch.cat([plan[n] for n in range(3)]), whole)

    def test_decoding_ahead_changes_nothing(self, tmp_path: Path) -> None:
        stored, streamed = (self.plan(self.images(tmp_path, streamed=s)) for s in (False, True))
        assert streamed.thread is not None
        assert stored.thread is None
        for n in (1, 2, 0):  # a continuation begins in the middle
            assert torch.equal(stored[n], streamed[n])

    def test_a_file_that_vanishes_is_named(self, tmp_path: Path) -> None:
        plan = self.plan(self.images(tmp_path, streamed=True))
        (tmp_path / "5.png").unlink()
        with raises("image-lost"):
            plan[0]


class TestStrong:
    def test_it_crops_and_colours_each_image_in_its_own_way(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(1, 3, 28, 28).expand(64, -1, -1, -1)
        y = strong(x)
        assert y.shape == x.shape
        assert len({round(float(image.mean()), 4) for image in y}) == 64
        grey = [bool((image[0] - image[1]).abs().max() < 1e-5) for image in y]
        assert 0 < sum(grey) < 64 * 3 * GREY

    def test_without_its_draws_it_is_the_image_itself(self, monkeypatch) -> None:
        """All of the area, no stretch, no change of colours."""
        draws = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0])
        monkeypatch.setattr("cdtrans.inputs.batches.random_rows", lambda x, count: draws.expand(len(x), -1))
        x = torch.randn(2, 3, 14, 14)
        torch.testing.assert_close(strong(x), x, atol=1e-4, rtol=1e-4)

    def test_masked_squares_are_zero_and_the_rest_is_untouched(self) -> None:
        torch.manual_seed(0)
        x = torch.rand(200, 3, 28, 28) + 1
        y = masked(x)
        squares = y.unflatten(3, (MASK_SQUARES, 4)).unflatten(2, (MASK_SQUARES, 4))
        empty = (squares == 0).all(dim=(1, 3, 5))  # [B, MASK_SQUARES, MASK_SQUARES]
        assert abs(float(empty.float().mean()) - MASKED) < 0.02
        assert ((y == x) | (y == 0)).all()
        assert ((y == 0).float().mean() - empty.float().mean()).abs() < 1e-6, "nothing but whole squares"
