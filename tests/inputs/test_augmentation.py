"""Strong augmentation keeps the picture's statistics in bounds and changes what it says it changes."""

import torch

from cdtrans.inputs.augmentation import GREY, MASKED, SQUARES, masked, strong


def test_it_crops_and_colours_each_image_in_its_own_way() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 28, 28).expand(64, -1, -1, -1)
    y = strong(x)
    assert y.shape == x.shape
    assert len({round(float(image.mean()), 4) for image in y}) == 64
    grey = [bool((image[0] - image[1]).abs().max() < 1e-5) for image in y]
    assert 0 < sum(grey) < 64 * 3 * GREY


def test_without_its_draws_it_is_the_image_itself(monkeypatch) -> None:
    """All of the area, no stretch, no change of colours."""
    draws = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0])
    monkeypatch.setattr("cdtrans.inputs.augmentation.random_rows", lambda x, count: draws.expand(len(x), -1))
    x = torch.randn(2, 3, 14, 14)
    torch.testing.assert_close(strong(x), x, atol=1e-4, rtol=1e-4)


def test_masked_squares_are_zero_and_the_rest_is_untouched() -> None:
    torch.manual_seed(0)
    x = torch.rand(200, 3, 28, 28) + 1
    y = masked(x)
    squares = y.unflatten(3, (SQUARES, 4)).unflatten(2, (SQUARES, 4))
    empty = (squares == 0).all(dim=(1, 3, 5))  # [B, SQUARES, SQUARES]
    assert abs(float(empty.float().mean()) - MASKED) < 0.02
    assert ((y == x) | (y == 0)).all()
    assert ((y == 0).float().mean() - empty.float().mean()).abs() < 1e-6, "nothing but whole squares"
