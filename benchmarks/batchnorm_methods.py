"""The methods for backbones with BatchNorm on a small ResNet with gates, from rendered to handwritten digits.

    python benchmarks/batchnorm_methods.py OUT [--methods cdan_tn mstn_dsbn dcan] [--seed 0] [--epochs 10]

All methods start from one stage 1. For each: accuracy in percent on the target of the source-only model, of the last
epoch, of the label-free choice and of the best epoch by labels; and seconds of the whole run. Labels are read
afterwards. There are no pretrained weights of such a network here, so this shows that the methods work, and not what
they reach on photographs."""

import argparse
import time
from pathlib import Path
from typing import Any

from cdtrans.inputs.digits import write_digits
from cdtrans.measure.measured import evaluate
from cdtrans.run.pipeline import adapt
from cdtrans.runtime.screen import Screen

SETTINGS: dict[str, Any] = {
    "recipe": "authors",
    "backbone": "resnet10t",
    "backbone_args": {"block_args": {"attn_layer": "se"}, "output_stride": 8, "channels": [16, 32, 64, 128]},
    "pretrained": False,
    **{"crop": 28, "resize": 32, "flip": 0.0, "drop_path": 0.0, "batch_size": 64},
    **{"optimizer": "adamw", "weight_decay": 0.05, "bias_lr_factor": 1.0, "schedule": "cosine", "warmup_epochs": 1},
    **{"source_epochs": 10, "source_lr": 2e-3, "lr": 1e-3, "rebuild_every": 1, "guard": False, "report": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", nargs="+", default=["cdan_tn", "mstn_dsbn", "dcan"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    digits = write_digits(options.out / f"digits-{options.seed}", seed=options.seed, images=1000)
    first = options.out / f"{options.methods[0]}-{options.seed}"
    print(f"{'method':12}{'source-only':>12}{'last':>8}{'chosen':>8}{'best':>8}{'seconds':>9}")
    for name in options.methods:
        run, started = options.out / f"{name}-{options.seed}", time.monotonic()
        settings = SETTINGS | {"method": name, "epochs": options.epochs, "seed": options.seed}
        settings |= {"source_model": None if run == first else str(first)}
        adapt(source=digits.source, target=digits.target, out=run, screen=Screen(quiet=True), **settings)
        seconds = time.monotonic() - started
        measured = evaluate(run, digits.answers, screen=Screen(quiet=True))
        accuracy = [scores.accuracy for scores in measured.epochs]
        numbers = (accuracy[0], accuracy[-1], measured.accuracy, max(accuracy[1:]))
        print(f"{name:12}" + "".join(f"{100 * x:>{w}.1f}" for x, w in zip(numbers, (12, 8, 8, 8), strict=True)), end="")
        print(f"{seconds:>9.0f}", flush=True)


if __name__ == "__main__":
    main()
