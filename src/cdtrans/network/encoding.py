"""One pass over a domain: everything that pairs, pseudo labels, predictions and scores are made from."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cdtrans.config import Config
from cdtrans.errors import Hopeless
from cdtrans.inputs.batches import Images
from cdtrans.network.graph import CudaGraph
from cdtrans.network.network import Network, Output
from cdtrans.runtime.device import TOO_LITTLE, autocast, between_passes, half, until_it_fits
from cdtrans.runtime.ranks import gather, world
from cdtrans.runtime.screen import Screen

FROZEN_BATCH = {"cpu": 16, "cuda": 1024, "mps": 256}  # images; on a CPU the results of more do not fit its cache


class Encoded(NamedTuple):
    """A domain as the target branch sees it."""

    features: Tensor  # [N, D]
    logits: Tensor  # [N, K]


Frozen = dict[str, Tensor]  # by the name of a domain the backbone's features of this rank's share, [N, D]


class Encoder:
    """Encodes domains again and again with the model as it is then: in eval mode and in the precision of training; what
    comes out is float32. Several ranks share the work, and each has the whole of it in the end. If the GPU has too
    little memory for a batch, this pass and all that follow have batches of half the size.

    `frozen` gets the features of a backbone of which nothing has been trained yet, so that it sees each image once,
    however often the head changes."""

    def __init__(self, model: Network, config: Config, screen: Screen, frozen: Frozen | None = None) -> None:
        self.model, self.config, self.screen, self.frozen = model, config, screen, frozen
        self.batch = config.encode_batch
        self.graph: CudaGraph[Output] | None = None
        self.capturable = False  # a pass has run plainly with batches of this size
        self.failed = False  # capturing did not work and is not tried again

    @torch.inference_mode()
    def __call__(self, images: Images, name: str) -> Encoded:
        self.model.eval()
        if self.frozen is not None:
            return self._finished(self._frozen(images, name, self.frozen), name)
        features, logits = self._pass(images, name, self._encode)
        encoded = self._finished(Encoded(gather(features), gather(logits)), name)
        self.capturable = images.device.type == "cuda" and self.config.compile != "off" and not self.failed
        return encoded

    def thaw(self) -> None:
        """Encode images anew from now on: training has begun."""
        if self.frozen is not None:
            self.frozen.clear()  # others hold it too
        self.frozen = None

    def _frozen(self, images: Images, name: str, known: Frozen) -> Encoded:
        if name not in known:
            most = FROZEN_BATCH[images.device.type]
            (known[name],) = self._pass(images, name, lambda x: (self.model.features(x),), most)
        with autocast(images.device, self.config.precision):
            out = [self.model.head(x) for x in known[name].split(self.config.encode_batch)]
        return Encoded(*(gather(torch.cat([part.float() for part in parts])) for parts in zip(*out, strict=True)))

    def _pass(
        self, images: Images, name: str, encode: Callable[[Tensor], tuple[Tensor, ...]], most: int | None = None
    ) -> list[Tensor]:
        """Everything that `encode` returns for this rank's share of the images, at most `most` of them at once."""

        def attempt() -> list[Tensor]:
            with (
                self.screen.track(f"encoding {name}", len(images)) as task,
                autocast(images.device, self.config.precision),
            ):
                out = []
                for x in images.in_order(min(self.batch, most or self.batch)):
                    out.append([part.float() for part in encode(x)])
                    task.advance(len(x) * world())
            return [torch.cat(parts) for parts in zip(*out, strict=True)]

        def use_less() -> None:
            batch = min(self.batch, most or self.batch, len(images))
            self.batch = half(batch, "encode", "use a smaller --backbone or --crop")
            self.graph, self.capturable = None, False
            self.screen.say(f"{TOO_LITTLE} to encode {batch} images at once: it encodes {self.batch} at a time.")

        return until_it_fits(attempt, use_less)

    def _finished(self, encoded: Encoded, name: str) -> Encoded:
        if not encoded.logits.isfinite().all():
            raise Hopeless(
                f"The model's scores of the {name} images are not finite",
                "Training has diverged: start again in another --out with a lower learning rate (--lr, --source-lr) or "
                "--precision fp32.",
            )
        return Encoded(*(x.to(between_passes(x.device)) for x in encoded))

    def _encode(self, x: Tensor) -> Output:
        if not self.capturable:
            return self.model.encode(x)
        missing = self.batch - len(x)  # in a domain's last batch; a graph knows one shape
        whole = torch.cat([x, x[:1].expand(missing, -1, -1, -1)]) if missing else x
        try:
            self.graph = self.graph or CudaGraph(self._without_cache, whole)
            out = self.graph(whole)
            return Output(out.feature[: len(x)].clone(), out.logits[: len(x)].clone())
        except Exception as error:  # a run that works without must not end
            self.screen.warn(f"Encoding could not be made faster and runs as before ({type(error).__name__}).")
            self.graph, self.capturable, self.failed = None, False, True
        return self.model.encode(x)

    def _without_cache(self, x: Tensor) -> Output:
        """The captured encoding: it rounds the weights in every replay, because they change between passes."""
        with autocast(x.device, self.config.precision, cache=False):
            return self.model.encode(x)
