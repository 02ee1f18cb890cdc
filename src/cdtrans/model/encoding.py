"""One pass over a domain: everything that pairs, pseudo labels, predictions and scores are made from."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cdtrans.config import Config
from cdtrans.data.batches import Images
from cdtrans.device import autocast
from cdtrans.errors import Hopeless
from cdtrans.model.branches import CDTrans
from cdtrans.model.head import Output
from cdtrans.ranks import gather
from cdtrans.screen import Screen

COMPILE_SECONDS = 30.0  # what compiling costs at first, beside an H200 (docs/results/speed.md), and some margin
COMPILE_SAVES = 0.2  # of a plain pass's time, for DeiT-small there, less some margin


class Encoded(NamedTuple):
    """A domain as the target branch sees it."""

    features: Tensor  # [N, D]
    logits: Tensor  # [N, K]


class Encoder:
    """Encodes domains again and again with the model as it is then: in eval mode and in the precision of training; what
    comes out is float32. Several ranks share the work, and each has the whole of it in the end."""

    def __init__(self, model: CDTrans, config: Config, screen: Screen) -> None:
        self.model, self.config, self.screen = model, config, screen
        self.ahead = 0  # images that will be encoded after the first pass
        self.compiled: Callable[[Tensor], Output] | None = None
        self.captured: Captured | None = None
        self.failed = False  # neither worked, and neither is tried again

    @torch.inference_mode()
    def __call__(self, images: Images, name: str) -> Encoded:
        self.model.eval()
        started = time.monotonic()
        features, logits = [], []
        with (
            self.screen.track(f"encoding {name}", len(images)) as task,
            autocast(images.device, self.config.precision),
        ):
            for x in images.in_order(self.config.encode_batch):
                out = self._encode(x)
                features.append(out.feature.float())
                logits.append(out.logits.float())
                task.advance(len(x))
        encoded = Encoded(gather(torch.cat(features)), gather(torch.cat(logits)))
        if not encoded.logits.isfinite().all():
            raise Hopeless(
                f"The model's scores of the {name} images are not finite: training has diverged. Start again in "
                "another --out with a lower learning rate (--lr, --source-lr) or --precision fp32."
            )
        if images.device.type == "cuda":
            self._decide((time.monotonic() - started) / len(images))
        return encoded

    def _decide(self, seconds: float) -> None:
        """After the first pass: compile if that saves more time on the images ahead than it takes, or else capture."""
        plan = "off" if self.failed else self.config.compile
        if plan == "full" or (plan == "auto" and self.ahead * seconds * COMPILE_SAVES > COMPILE_SECONDS):
            self.compiled = self.compiled or torch.compile(self.model.encode, dynamic=False)
        elif plan != "off" and self.compiled is None and self.captured is None:
            self.captured = Captured(self.model.encode, self.config)
        self.ahead = 0

    def _encode(self, x: Tensor) -> Output:
        fast = self.compiled or self.captured
        if fast is None:
            return self.model.encode(x)
        missing = self.config.encode_batch - len(x)  # in a domain's last batch; both know one shape
        try:
            out = fast(torch.cat([x, x[:1].expand(missing, -1, -1, -1)]) if missing else x)
        except Exception as error:  # as in a training step: a run that works without must not end
            self.screen.warn(f"Encoding could not be made faster and runs as before ({type(error).__name__}).")
            self.compiled, self.captured, self.failed = None, None, True
            return self.model.encode(x)
        return Output(out.feature[: len(x)], out.logits[: len(x)])


class Captured:
    """The encoding of one batch as a CUDA graph. A small model is launched kernel by kernel more slowly than the GPU
    computes it, and the GPU would idle between epochs. It reads the weights where they are, so it follows training."""

    def __init__(self, encode: Callable[[Tensor], Output], config: Config) -> None:
        self.encode, self.config = encode, config
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, x: Tensor) -> Output:
        if self.graph is None:
            self.input = x.clone()
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(x.device)
            with (
                torch.cuda.graph(self.graph, capture_error_mode="thread_local"),
                autocast(x.device, self.config.precision, cache=False),  # no weight rounded before the capture
            ):
                self.output = self.encode(self.input)
        self.input.copy_(x)
        self.graph.replay()
        return Output(self.output.feature.clone(), self.output.logits.clone())
