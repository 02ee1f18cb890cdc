"""Stage 1 written a second time, from the description of the authors' code alone.

It shares nothing with cdtrans but timm: torchvision's transforms and ImageFolder, a shuffled DataLoader, one parameter
group per parameter, fp16 with a scaler. It answers one question: is a difference to the authors' accuracy in our
machinery? See docs/results/office31-deit-tiny.md.

usage: python benchmarks/independent_source.py DATA WEIGHTS SOURCE SEED    (SOURCE: amazon, dslr or webcam; needs a GPU)
"""

import sys
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

BASE_LR, EPOCHS, BATCH = 0.008, 10, 64
NORMALISE = [T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
TRAIN = T.Compose([T.Resize((256, 256)), T.RandomCrop(224), T.RandomHorizontalFlip(), *NORMALISE])
TEST = T.Compose([T.Resize((256, 256)), T.CenterCrop(224), *NORMALISE])


def build(weights: str, classes: int) -> nn.Module:
    vit: Any = timm.create_model("deit_tiny_patch16_224", drop_path_rate=0.1)
    vit.load_state_dict({name: tensor.float() for name, tensor in load_file(weights).items()})
    vit.reset_classifier(0)
    neck = nn.BatchNorm1d(192)
    neck.bias.requires_grad_(False)
    classifier = nn.Linear(192, classes, bias=False)
    nn.init.normal_(classifier.weight, std=0.001)
    return nn.Sequential(vit, neck, classifier).cuda()


def train(model: nn.Module, images: ImageFolder) -> None:
    loader = DataLoader(images, BATCH, shuffle=True, num_workers=3, persistent_workers=True)
    factors = [(p, 2 if "bias" in name else 1) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([{"params": [p], "factor": f} for p, f in factors], BASE_LR, 0.9, weight_decay=1e-4)
    scaler = torch.amp.grad_scaler.GradScaler("cuda")
    for epoch in range(1, EPOCHS + 1):
        for group in optimizer.param_groups:
            start, peak = 0.01 * BASE_LR, BASE_LR * group["factor"]
            group["lr"] = start + epoch * (peak - start) / 10 if epoch < EPOCHS else 0.002 * BASE_LR
        model.train()
        for x, y in loader:
            if len(x) == 1:
                continue
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda(), label_smoothing=0.1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()


@torch.inference_mode()
def accuracy(model: nn.Module, images: ImageFolder) -> float:
    model.eval()
    right = sum(int((model(x.cuda()).argmax(1).cpu() == y).sum()) for x, y in DataLoader(images, 256, num_workers=3))
    return 100 * right / len(images)


def main(data: str, weights: str, source: str, seed: str) -> None:
    torch.manual_seed(int(seed))
    images = ImageFolder(str(Path(data) / source / "images"), TRAIN)
    model = build(weights, len(images.classes))
    train(model, images)
    for target in sorted({"amazon", "dslr", "webcam"} - {source}):
        found = accuracy(model, ImageFolder(str(Path(data) / target / "images"), TEST))
        print(f"{source}>{target} seed {seed}: {found:.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
