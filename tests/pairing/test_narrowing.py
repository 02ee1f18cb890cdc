"""Classes and source images in the numbers of the classes that occur, and back."""

import numpy as np
import pytest
import timm
import torch

from cdtrans.network.network import Head, Network, feature_dim
from cdtrans.pairing.narrowing import NEVER, Numbering, narrowed

LABELS = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0, 4])
OCCURS = torch.tensor([False, True, False, True, True])


def numbering(occurs: torch.Tensor = OCCURS) -> Numbering:
    return Numbering.of(occurs, LABELS)


class TestNumbering:
    def test_classes_and_images_that_occur(self) -> None:
        found = numbering()
        assert found.classes.tolist() == [1, 3, 4]
        assert found.source.tolist() == [1, 3, 4, 6, 8]
        assert found.beside.tolist() == [0, 2, 5, 7]
        assert not found.whole
        assert numbering(torch.ones(5, dtype=torch.bool)).whole

    def test_labels_come_back(self) -> None:
        found = numbering()
        ours = found.new_labels(LABELS[found.source])
        assert ours.tolist() == [0, 1, 1, 0, 2]
        back = found.labels(ours.numpy().astype(np.int32))
        assert back.tolist() == LABELS[found.source].tolist()
        assert back.dtype == np.int32

    def test_scores_of_absent_classes_are_never(self) -> None:
        logits = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
        whole = numbering().logits(logits)
        assert whole.dtype == np.float32
        assert np.array_equal(whole[:, [1, 3, 4]], logits)
        assert (whole[:, [0, 2]] == NEVER).all()
        assert torch.from_numpy(whole).softmax(dim=1)[:, [0, 2]].eq(0).all(), "exactly"

    def test_pairs_come_back(self) -> None:
        found = numbering()
        ours = {
            "source": np.array([0, 4, -1], np.int32),
            "target": np.array([7, 8, 9], np.int32),
            "source_labels": np.array([0, 2, 1], np.int32),
            "target_labels": np.array([0, 1, 2], np.int32),
        }
        whole = found.pairs(ours)
        assert whole["source"].tolist() == [1, 8, -1], "-1 is no source image"
        assert whole["target"].tolist() == [7, 8, 9]
        assert whole["source_labels"].tolist() == [1, 4, 3]
        assert whole["target_labels"].tolist() == [1, 3, 4]
        assert whole["source"].dtype == np.int32

    def test_images_of_absent_classes_keep_what_is_given_for_them(self) -> None:
        values = np.arange(5, dtype=np.float16)
        whole = numbering().per_image(values, np.full(9, 9.0, np.float16))
        assert whole.tolist() == [9, 0, 9, 1, 2, 9, 3, 9, 4]


class TestNarrowed:
    @pytest.mark.parametrize("neck", ["batchnorm", "none"])
    def test_it_scores_the_classes_that_occur_as_the_full_network(self, neck: str) -> None:
        full = network(neck)
        small = narrowed(full, numbering().classes)
        images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            a, b = full.eval().encode(images).logits, small.eval().encode(images).logits
        assert b.shape == (4, 3)
        torch.testing.assert_close(b, a[:, numbering().classes])

    def test_the_other_weights_are_shared_and_the_full_head_is_left_alone(self) -> None:
        full = network("batchnorm")
        before = full.head.classifier.weight.clone()
        small = narrowed(full, numbering().classes)
        assert small.backbone is full.backbone
        assert small.head.neck is full.head.neck
        with torch.no_grad():
            small.head.classifier.weight.zero_()
        assert full.head.classifier.weight.equal(before)

    def test_where_every_class_occurs_it_is_the_same_network(self) -> None:
        full = network("none")
        assert narrowed(full, numbering(torch.ones(5, dtype=torch.bool)).classes) is full


def network(neck: str) -> Network:
    torch.manual_seed(0)
    args = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 16}
    backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0, **args)
    made = Network(backbone, Head(feature_dim(backbone), 5, neck))
    if neck == "batchnorm":  # statistics that are not those of a new one
        made.head.neck.running_mean.normal_()
        made.head.neck.running_var.uniform_(0.5, 2)
    return made
