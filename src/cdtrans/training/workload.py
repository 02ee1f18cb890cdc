"""The work of a run, planned before it begins. The unit is one image that passes the backbone forward; training on an
image takes three, because the backward pass takes twice as long as the forward pass."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from cdtrans.config import Config, check_options
from cdtrans.inputs.batches import Images
from cdtrans.methods.base import Method, Sizes
from cdtrans.network.network import Network
from cdtrans.record.run import Run
from cdtrans.runtime.device import autocast
from cdtrans.runtime.outlook import Outlook, in_words
from cdtrans.runtime.ranks import world
from cdtrans.runtime.screen import Screen
from cdtrans.training.source import batch_slices, step_work
from cdtrans.training.state import load_state

MEASURED = (4, 64)  # images in a batch, to measure the pace: few, and more if these take no time
MEASURED_SECONDS = 0.2  # that a measurement should take
REPORT_SECONDS, END_SECONDS = 4.0, 1.0  # to write the report; to judge and save the models


@dataclass(frozen=True)
class Workload:
    """The work of stage 2, from any place in it to the end of the run. `pairs` are those of a round; until they are
    known, it is what the method expects."""

    config: Config
    method: type[Method]
    sizes: Sizes
    held_out: int  # source images

    def stage_2(self, epoch: int = 1, step: int = 0, pairs: int | None = None) -> float:
        """From where a session begins it or resumes it. Each session encodes the target first."""
        source, target = self.sizes.source_images, self.sizes.target_images
        first = target + (self.held_out if (epoch, step) == (1, 0) else 0)
        if self.config.source_fit == "probe" and not self.method.trains:
            return first + source  # the backbone stays as it is and sees every image once
        plans = step == 0 and epoch <= self.config.epochs and (epoch - 1) % self.config.rebuild_every == 0
        pairs = self.expected_pairs() if pairs is None else pairs
        return first + (source if plans else 0) + self.training(epoch, step, pairs)

    def training(self, epoch: int, step: int, pairs: int) -> float:
        """From a step of an epoch whose pairs have been planned."""
        config, (_, source, target) = self.config, self.sizes
        epochs = config.epochs - epoch + 1
        size = max(1, min(config.batch_size, pairs))
        steps = epochs * (pairs // size) - step
        plans = self._rounds(config.epochs) - self._rounds(min(epoch, config.epochs))
        encoded = epochs * (target + self.held_out) + plans * source
        return encoded + steps * size * self.method.passes + source  # which the guard looks at in the end

    def expected_pairs(self) -> int:
        if not self.method.trains:
            return 0
        options = check_options(self.method.Options, self.config.method_args, self.config.method)
        return self.method.expected_pairs(options, self.sizes, self._rounds(self.config.epochs))

    def _rounds(self, epoch: int) -> int:
        """How many rounds have begun by this epoch."""
        return -(-epoch // self.config.rebuild_every)


def stage_1_work(config: Config, images: int, epoch: int = 1, step: int = 0) -> float:
    """Of training on the source, from a step of an epoch on."""
    batches = batch_slices(images, config.batch_size)
    steps = (config.source_epochs - epoch + 1) * len(batches) - step
    return steps * step_work(batches)


def work_ahead(workload: Workload, state: dict[str, Any] | None, *, fits_source: bool, evidence: bool) -> float:
    """Of the run, or of what is left of it after the saved state. `fits_source`: whether stage 1 is trained here;
    `evidence`: whether both domains are encoded for the guard first."""
    config, (_, source, target) = workload.config, workload.sizes
    first = source + target if evidence else 0
    if state is not None and state["stage"] == "adaptation":
        pairs = state["parts"]["planner"]
        return first + workload.stage_2(state["epoch"], state["step"], len(pairs["source"]) if pairs else None)
    if not fits_source:
        return first + workload.stage_2()
    place = (1, 0) if state is None else (state["epoch"], state["step"])
    return first + stage_1_work(config, source, *place) + workload.stage_2()


def start_clock(
    screen: Screen,
    workload: Workload,
    run: Run,
    network: Network,
    images: Images,
    *,
    resumed: bool,
    fits_source: bool,
    evidence: bool,
) -> None:
    """Print how long the run will take. From now on the screen shows the time left."""
    config, device = workload.config, images.device
    rest = END_SECONDS + (REPORT_SECONDS if config.report else 0)
    try:
        pace = measured_pace(network, images, config) / world()
    except torch.cuda.OutOfMemoryError:  # which the run itself will deal with
        return
    ahead = work_ahead(workload, load_state(run), fits_source=fits_source, evidence=evidence)
    screen.outlook = Outlook(ahead, pace, rest=rest, wait=lambda: wait_for(device))
    time_left = in_words(screen.outlook.left())
    epochs = [config.source_epochs] * fits_source + [config.epochs] * workload.method.trains
    training = f"{' + '.join(map(str, epochs))} epoch{'s' * (sum(epochs) > 1)}" if epochs else "no training,"
    screen.say(
        f"About {time_left} are left."
        if resumed
        else f"This run will take about {time_left} ({training} on {config.device})."
    )


@torch.no_grad()
def measured_pace(network: Network, images: Images, config: Config) -> float:
    """Seconds that an image takes to pass the backbone on this rank, by a few images after a first batch that warms up.
    A small network is slower with few at once, so it is measured with more. The network is left as it was, and so are
    the random numbers of the run."""
    device = images.device
    modes = [(module, module.training) for module in network.modules()]
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), autocast(device, config.precision):
        network.eval()
        for most in MEASURED:
            size = min(most, config.batch_size, config.encode_batch)
            indices = torch.arange(size, device=images.home) % len(images)
            network.features(images.centred(indices))
            wait_for(device)
            start, done, seconds = time.monotonic(), 0, 0.0
            while done < 4 and seconds < MEASURED_SECONDS:
                network.features(images.centred(indices))
                wait_for(device)
                done, seconds = done + 1, time.monotonic() - start
            if seconds >= MEASURED_SECONDS:
                break
    for module, training in modes:
        module.training = training
    return seconds / (done * size)


def wait_for(device: torch.device) -> None:
    """Until it has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
