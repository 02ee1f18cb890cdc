"""A step of stage 2 as the tool takes it, by any method: losses, backward, clipping, optimiser; and encoding.

usage: python benchmarks/train_step.py [--model NAME ...] [--method cdtrans ...] [--pairs 64 ...] [--compile off graph]
       [--encode-batch 256 ...] [--profile] [--json FILE]
On CPU a tiny model stands in, so that anybody can try it."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import timm
import torch
from torch import Tensor

import measure
from cdtrans.config import make_config
from cdtrans.methods import METHODS, method_class
from cdtrans.methods.base import Batch, Sizes
from cdtrans.network.graph import CudaGraph
from cdtrans.network.network import Head, Network, Output
from cdtrans.run.pipeline import make_method
from cdtrans.runtime.device import autocast, pick_precision
from cdtrans.runtime.screen import Screen
from cdtrans.training.adaptation import training_step
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.step import WARM_UP, Memory, Step

CLASSES = 65
SOFT_LABELS = ("rpll", "mrkld_lrent", "cotraining")  # methods whose pseudo-labels are distributions


def build(name: str, device: str) -> Network:
    torch.manual_seed(0)
    vit: Any = timm.create_model(name, num_classes=0, drop_path_rate=0.1)
    return Network(vit, Head(vit.num_features, CLASSES, "batchnorm")).to(device)


def pair_flops(model: Network) -> float:
    """Forward and backward of one pair, as computed: the source-target branch makes no queries, keys or values of its
    own, and the last block ends with the class tokens."""
    vit: Any = model.backbone
    n, d, depth = vit.pos_embed.shape[1], vit.embed_dim, len(vit.blocks)
    product, attention = 2 * d * d, 4 * d  # FLOPs for a token, and for a query with a key
    block = 2 * n * 3 * product + 3 * n * n * attention + 3 * n * 9 * product
    last = 2 * n * 3 * product + 3 * n * attention + 3 * 9 * product
    return float(3 * ((depth - 1) * block + last))


def train_step(
    name: str, kind: str, pairs: int, plan: str, precision: str, arguments: Any, ceiling: float
) -> dict[str, Any]:
    device = arguments.device
    model = build(name, device).train()
    config = make_config({"precision": precision, "method": kind})
    method = make_method(method_class(kind), model, config, Sizes(CLASSES, pairs, pairs)).to(device).train()
    optimisation = Optimisation(
        method, config, lr=0.008, epochs=40, device=torch.device(device), rates=method.rates(), network=model
    )
    memory = Memory(method, "pairs", Screen())
    step = Step(training_step(method, optimisation), optimisation, memory, plan, capturable=method.capturable)
    size = model.backbone.patch_embed.img_size[0]  # type: ignore[index]
    x = torch.randn(2, pairs, 3, size, size, device=device)
    y = torch.randint(CLASSES, (2, pairs), device=device)
    soft = torch.nn.functional.one_hot(y[1], CLASSES).float() if kind in SOFT_LABELS else y[1]
    batch = Batch(x[0], y[0], x[1], soft, torch.arange(pairs, device=device), torch.ones(pairs, device=device))
    optimisation.start_epoch(1)
    warm_up = WARM_UP + 3 if device == "cuda" else 1
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    work = partial(step, *batch, torch.tensor(0.5, device=device))
    ready = measure.timed(work, device, warm_up, warm_up=0)
    seconds = measure.timed(work, device, arguments.repeats, warm_up=0)
    if arguments.profile:
        measure.profile(work, device)
    flops = pair_flops(model) * pairs / seconds["median"]
    return {
        "model": name,
        "method": kind,
        "pairs": pairs,
        "plan": plan,
        "precision": precision,
        "ms": 1000 * seconds["median"],
        "ms least": 1000 * seconds["least"],
        "ms most": 1000 * seconds["most"],
        "pairs/s": pairs / seconds["median"],
        "TFLOP/s": flops / 1e12 if kind == "cdtrans" else float("nan"),
        "% of ceiling": 100 * flops / ceiling if kind == "cdtrans" else float("nan"),
        "s for the slowest warm-up step": ready["most"],
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0,
    }


@torch.inference_mode()
def encode(name: str, batch: int, plan: str, precision: str, arguments: Any) -> dict[str, Any]:
    device = arguments.device
    model = build(name, device).eval()
    size = model.backbone.patch_embed.img_size[0]  # type: ignore[index]
    x = torch.randn(batch, 3, size, size, device=device)
    run: Callable[[Tensor], Output] = model.encode
    if plan == "graph":
        with autocast(torch.device(device), precision):
            model.encode(x)  # as a first pass does it: libraries cannot be loaded during a capture

        def without_cache(x: Tensor) -> Output:
            with autocast(torch.device(device), precision, cache=False):
                return model.encode(x)

        captured = cache(lambda: CudaGraph(without_cache, x))  # by the first of the timed calls
        run = lambda x: captured()(x)  # noqa: E731

    def work() -> None:
        with autocast(torch.device(device), precision):
            run(x)

    ready = measure.timed(work, device, 3, warm_up=0)
    seconds = measure.timed(work, device, arguments.repeats, warm_up=0)
    return {
        "model": name,
        "encoded at once": batch,
        "plan": f"encode, {plan}",
        "precision": precision,
        "ms": 1000 * seconds["median"],
        "ms least": 1000 * seconds["least"],
        "ms most": 1000 * seconds["most"],
        "images/s": batch / seconds["median"],
        "s for the slowest warm-up step": ready["most"],
    }


def main() -> None:
    parser = measure.parser(__doc__ or "")
    gpu = torch.cuda.is_available()
    parser.add_argument("--model", nargs="+", default=["deit_small_patch16_224"] if gpu else ["test_vit.r160_in1k"])
    parser.add_argument("--method", nargs="+", choices=METHODS, default=["cdtrans"])
    parser.add_argument("--pairs", nargs="+", type=int, default=[64] if gpu else [8])
    parser.add_argument("--compile", nargs="+", choices=["off", "graph"], default=["off", "graph"] if gpu else ["off"])
    parser.add_argument("--encode-batch", nargs="+", type=int, default=[256, 1024] if gpu else [16])
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a training step")
    arguments = parser.parse_args()
    precision = pick_precision("auto", torch.device(arguments.device))
    ceiling = measure.matrix_ceiling(arguments.device, torch.bfloat16 if precision == "bf16" else torch.float32)
    rows = []
    for name in arguments.model:
        for pairs in arguments.pairs:
            for kind in arguments.method:
                for plan in arguments.compile:
                    rows.append(train_step(name, kind, pairs, plan, precision, arguments, ceiling))
        for batch in arguments.encode_batch:
            rows += [encode(name, batch, plan, precision, arguments) for plan in arguments.compile]
    measure.report(f"training step (matrix ceiling {ceiling / 1e12:.4g} TFLOP/s)", rows, arguments)


if __name__ == "__main__":
    main()
