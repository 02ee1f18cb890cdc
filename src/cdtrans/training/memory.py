"""What a training step does when the GPU has too little memory for it."""

from typing import Any

from torch import Tensor, nn

from cdtrans.errors import CdtransError
from cdtrans.network.network import Network, has_batchnorm
from cdtrans.runtime.device import TOO_LITTLE
from cdtrans.runtime.ranks import world
from cdtrans.runtime.screen import Screen


class Memory:
    """How the networks of a stage compute a batch: at once, or in parts. It is part of the state, so that a resumed run
    starts with what fitted.

    The backbone computes the parts and the head gets the whole batch, so that the result is the same but for rounding.
    Only dropout, and the stochastic depth of backbones other than ViTs, are drawn anew for each part. The first remedy
    is twice as many parts, down to one image or pair in each; the last is to compute each block again in the backward
    pass."""

    def __init__(self, module: nn.Module, unit: str, screen: Screen) -> None:
        """`module` has all networks of the stage; a batch is of so many of the `unit`, such as 'pairs'."""
        self.module, self.unit, self.screen = module, unit, screen
        self.networks = [network for network in module.modules() if isinstance(network, Network)]
        self.load_state_dict({})

    def use_less(self, count: int) -> None:
        """Compute batches of this size in smaller parts from now on. If there is nothing left to try, say so."""
        batch = f"{TOO_LITTLE} for {count} {self.unit} at once"
        if world() > 1:  # the others already wait for this rank, with parts of their own size
            raise CdtransError(
                f"{batch} in one process of {world()}; use a smaller --batch-size or fewer processes per GPU."
            )
        if any(has_batchnorm(network.backbone) for network in self.networks):
            raise CdtransError(
                f"{batch}, and the backbone's BatchNorm layers need all of them; use a smaller --batch-size, or a "
                "backbone without BatchNorm, such as deit_small or convnext_tiny."
            )
        if self.parts < count:
            self._set(min(2 * self.parts, count), recompute_blocks=False)
            how = f"it computes {-(-count // self.parts)} at a time"
        elif not self.recompute_blocks:
            self._set(self.parts, recompute_blocks=True)
            how = "it computes one at a time, and each block again in the backward pass"
        else:
            raise CdtransError(
                f"{TOO_LITTLE} for this backbone, even one image at a time; use a smaller --backbone or --crop, or a "
                "smaller --batch-size if other programs use the GPU too."
            )
        self.screen.say(f"{batch}: {how} (slower; the losses are still those of the whole batch).")

    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Everything that a forward pass may change, such as running statistics, and a copy of it."""
        return [(buffer, buffer.clone()) for buffer in self.module.buffers()]

    def _set(self, parts: int, *, recompute_blocks: bool) -> None:
        self.parts, self.recompute_blocks = parts, recompute_blocks
        for network in self.networks:
            network.compute_in_parts(parts, recompute_blocks=recompute_blocks)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts, "recompute_blocks": self.recompute_blocks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._set(state.get("parts", 1), recompute_blocks=state.get("recompute_blocks", False))
