"""One pass over a domain: everything that pairs, pseudo labels, predictions and scores are made from."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cdtrans.config import Config
from cdtrans.errors import CdtransError, Hopeless
from cdtrans.inputs.batches import Images
from cdtrans.network.head import Output
from cdtrans.network.network import Network
from cdtrans.runtime.device import TOO_LITTLE, autocast, between_passes, free_memory
from cdtrans.runtime.ranks import gather, world
from cdtrans.runtime.screen import Screen

FROZEN_BATCH = {"cpu": 16, "cuda": 1024, "mps": 256}  # images; on a CPU the results of more do not fit its cache


class Encoded(NamedTuple):
    """A domain as the target branch sees it."""

    features: Tensor  # [N, D]
    logits: Tensor  # [N, K]


class Frozen:
    """The features of a backbone that nothing has been trained of yet, so that it sees each image once, however often
    the head changes. `thaw` when training begins."""

    def __init__(self) -> None:
        self.features: dict[str, Tensor] | None = {}  # by the name of a domain: [N, D], this rank's share

    def thaw(self) -> None:
        self.features = None


class Encoder:
    """Encodes domains again and again with the model as it is then: in eval mode and in the precision of training; what
    comes out is float32. Several ranks share the work, and each has the whole of it in the end.

    If the GPU has too little memory for a batch, a pass begins again with batches of half the size, and so do all that
    follow."""

    def __init__(self, model: Network, config: Config, screen: Screen, frozen: Frozen | None = None) -> None:
        self.model, self.config, self.screen, self.frozen = model, config, screen, frozen
        self.batch = config.encode_batch
        self.captured: Captured | None = None
        self.failed = False  # capturing did not work and is not tried again

    @torch.inference_mode()
    def __call__(self, images: Images, name: str) -> Encoded:
        self.model.eval()
        if self.frozen is not None and self.frozen.features is not None:
            return self._finished(self._frozen(images, name, self.frozen.features), name)
        features, logits = self._pass(images, name, self._encode)
        encoded = self._finished(Encoded(gather(features), gather(logits)), name)
        if images.device.type == "cuda" and self.config.compile != "off" and not self.failed:
            self.captured = self.captured or Captured(self.model.encode, self.config)  # for every later pass
        return encoded

    def _frozen(self, images: Images, name: str, known: dict[str, Tensor]) -> Encoded:
        if name not in known:
            most = FROZEN_BATCH[images.device.type]
            (known[name],) = self._pass(images, name, lambda x: (self.model.features(x),), most)
        with autocast(images.device, self.config.precision):
            out = [self.model.head(x) for x in known[name].split(self.config.encode_batch)]
        return Encoded(*(gather(torch.cat([part.float() for part in parts])) for parts in zip(*out, strict=True)))

    def _pass(
        self, images: Images, name: str, encode: Callable[[Tensor], tuple[Tensor, ...]], most: int | None = None
    ) -> list[Tensor]:
        """What `encode` makes of this rank's share of the images, at most so many of them at once."""
        while True:
            batch = min(self.batch, most or self.batch)
            try:
                with (
                    self.screen.track(f"encoding {name}", len(images), work=world()) as task,
                    autocast(images.device, self.config.precision),
                ):
                    out = []
                    for x in images.in_order(batch):
                        out.append([part.float() for part in encode(x)])
                        task.advance(len(x))
                return [torch.cat(parts) for parts in zip(*out, strict=True)]
            except torch.cuda.OutOfMemoryError:
                pass  # continue where the exception no longer refers to the tensors of this pass
            self._use_less(min(batch, len(images)))

    def _use_less(self, batch: int) -> None:
        if batch == 1:
            raise CdtransError(f"{TOO_LITTLE} to encode a single image; use a smaller --backbone or --crop.")
        self.batch, self.captured = batch // 2, None
        free_memory()
        self.screen.say(f"{TOO_LITTLE} to encode {batch} images at once: it encodes {self.batch} at a time.")

    def _finished(self, encoded: Encoded, name: str) -> Encoded:
        if not encoded.logits.isfinite().all():
            raise Hopeless(
                f"The model's scores of the {name} images are not finite",
                "Training has diverged: start again in another --out with a lower learning rate (--lr, --source-lr) or "
                "--precision fp32.",
            )
        return Encoded(*(x.to(between_passes(x.device)) for x in encoded))

    def _encode(self, x: Tensor) -> Output:
        if self.captured is None:
            return self.model.encode(x)
        missing = self.batch - len(x)  # in a domain's last batch; a graph knows one shape
        try:
            out = self.captured(torch.cat([x, x[:1].expand(missing, -1, -1, -1)]) if missing else x)
        except Exception as error:  # a run that works without must not end
            self.screen.warn(f"Encoding could not be made faster and runs as before ({type(error).__name__}).")
            self.captured, self.failed = None, True
        if self.captured is None:
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
