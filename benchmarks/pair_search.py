"""The two-way search against one plain matrix product of the same size.

usage: python benchmarks/pair_search.py [--size SOURCES TARGETS DIM] [--json FILE]"""

from typing import Any

import torch
from torch.nn import functional as F

import measure
from cdtrans.pairing.neighbours import two_way


def search(arguments: Any, sources: int, targets: int, dim: int) -> dict[str, Any]:
    device = arguments.device
    generator = torch.Generator(device).manual_seed(0)
    source, target = (F.normalize(torch.randn(n, dim, device=device, generator=generator)) for n in (sources, targets))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = measure.timed(lambda: two_way(source, target), device, arguments.repeats, warm_up=1)
    row = {
        "sources": sources,
        "targets": targets,
        "dim": dim,
        "s": seconds["median"],
        "s least": seconds["least"],
        "s most": seconds["most"],
        "TFLOP/s": 2e-12 * sources * targets * dim / seconds["median"],
        "GiB beside the features": (torch.cuda.max_memory_allocated() - before) / 2**30 if device == "cuda" else 0.0,
    }
    if 4 * sources * targets < 8 * 2**30:  # the whole matrix fits: how much more than its product is the search?
        product = measure.timed(lambda: source @ target.T, device, arguments.repeats, warm_up=1)["median"]
        row |= {"plain product s": product, "times the product": seconds["median"] / product}
    return row


def main() -> None:
    parser = measure.parser(__doc__ or "")
    parser.add_argument("--size", nargs=3, type=int, action="append", metavar=("SOURCES", "TARGETS", "DIM"))
    arguments = parser.parse_args()
    small = [4_000, 4_000, 384] if arguments.device == "cpu" else [20_000, 20_000, 384]
    sizes: list[list[int]] = arguments.size or [small]
    measure.report("two-way search", [search(arguments, *size) for size in sizes], arguments)


if __name__ == "__main__":
    main()
