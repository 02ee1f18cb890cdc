"""SSRT (Sun et al. 2022): DANN for ViTs, and predictions of target images that perturbed tokens must not change.

    min  CE(source) + 2 L_domain + 0.2 r L_refine          L_domain: DANN's, lambda rises to 0.1

At one of three blocks, drawn in each step (0, 4 and 8 of 12), the tokens x of a target image are moved towards those of
another target image x': x~ = x + alpha r sg(x' - x), alpha = 0.3. With the predictions p of x and p~ of x~

    L_refine = mean of KL(p || p~) over max p > 0.4,   or of KL(p~ || p) over max p~ > 0.4, either with chance 1/2

and gradient flows through both. r is the safe training: it rises as a quarter of a sine to 1 over a period. In every
step the distinct classes predicted in the target batch are counted. At a period's end the counts are averaged over 1,
2, 4, 8 and 16 parts of it. If an average is more than 1 below the one before it, at r > 0.1, the network and the critic
go back to the period's start, and r to 0; two such returns in a row double the rise of r.

This is the safe training as the authors mean it: their snapshot is a reference to the weights themselves, here it is a
copy. All decisions are tensors, so a step can be captured. Changed: a period is 1/10 of the run (1000 of their steps on
Office-31); averages over fewer than MEANINGFUL steps do not count; x' is the neighbour in the batch; x~ is computed
from block 0 on whatever block is drawn, and shares x's draw of stochastic depth. Not taken: bottleneck, classifier."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cdtrans.methods.base import Batch, Sizes, Update, follow
from cdtrans.methods.dann import DANN
from cdtrans.network.blocks import AttentionStep, embed, self_attention
from cdtrans.network.network import Network, Output
from cdtrans.network.operations import Residual, Stream
from cdtrans.runtime.ranks import gather
from cdtrans.schema import option

PARTS = 16  # parts of a period
MEANINGFUL = 30  # steps: fewer have averages that differ by 1 by chance


class SSRT(DANN):
    """DANN, and predictions that perturbed tokens do not change."""

    @dataclass(frozen=True)
    class Options(DANN.Options):
        trade_off: float = option(2.0, "Weight of the critic's loss.", minimum=0)
        largest: float = option(0.1, "What lambda rises to.", minimum=0)
        refinement: float = option(0.2, "Weight of the self-refinement.", minimum=0)
        perturbation: float = option(0.3, "Strength alpha of the perturbation (Office-31: 0.2).", minimum=0)
        confidence: float = option(0.4, "Predictions below this refine nothing.", minimum=0, maximum=1)
        period: float = option(0.1, "Part of the run between two looks back.", minimum=0.001, maximum=1)

    options: Options
    paper = "Sun et al. 2022"
    title = "Safe Self-Refinement for Transformer-based Domain Adaptation, CVPR"
    backbones = "ViT"

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        depth = len(network.backbone.blocks)
        self.perturbed = sorted({0, depth // 3, 2 * depth // 3})  # blocks
        self.safe = SafeTraining(options.period)
        self.snapshot = nn.ModuleList(copy.deepcopy(module) for module in (network, self.critic)).requires_grad_(False)

    def train_step(self, batch: Batch, progress: Tensor, update: Update) -> dict[str, Tensor]:
        if self.options.refinement:
            self.go_back_or_on(progress)
        return super().train_step(batch, progress, update)

    @torch.no_grad()
    def go_back_or_on(self, progress: Tensor) -> None:
        """At the end of a period: return to the snapshot if predictions fell, then make the next one."""
        ended, failed = (decision.float() for decision in self.safe.look_back(progress))
        for saved, current in zip(self.snapshot, (self.network, self.critic), strict=True):
            follow(current, saved, failed)
            follow(saved, current, ended)

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        options, r = self.options, self.safe.strength(progress)
        features = self.features(batch.x_s, batch.x_t, options.perturbation * r)
        out = self.network.head.classify(torch.cat([gather(x) for x in features]))
        source, target, perturbed = (Output(f, z) for f, z in zip(*(x.chunk(3) for x in out), strict=True))
        self.safe.count(target.logits.detach(), progress)
        refined = refinement(target.logits, perturbed.logits, options.confidence)
        losses = self.losses_of(source, target, batch, progress)
        return losses | {"loss_refinement": options.refinement * r * refined}

    def features(self, x_s: Tensor, x_t: Tensor, strength: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, D] of source, target and perturbed target. They lie pair by pair, and two pairs stay together, so that a
        batch in parts has neighbours too."""
        network = self.network
        tokens = embed(network.backbone, torch.cat([x_s, x_t]))
        scales = network.drop_path_scales(tokens.x, [len(x_s), len(x_t)])  # [depth, 2, 2B]
        scales = None if scales is None else three(scales, dim=2)
        drawn = torch.randint(len(self.perturbed), (), device=x_t.device)
        strengths = {
            id(network.backbone.blocks[number]): strength * (drawn == n) for n, number in enumerate(self.perturbed)
        }
        tokens = tokens._replace(x=three(tokens.x))
        features = network.run_blocks(tokens, scales, perturbing(strengths), together=6)  # [3B, D]
        source, target, perturbed = features.unflatten(0, (-1, 3)).unbind(1)
        return source, target, perturbed


def three(x: Tensor, dim: int = 0) -> Tensor:
    """Sources, then targets -> source, target and target again, pair by pair."""
    source, target = x.chunk(2, dim)
    return torch.stack([source, target, target], dim + 1).flatten(dim, dim + 1)


def perturbing(strengths: dict[int, Tensor]) -> AttentionStep:
    """Self-attention that first perturbs the third image of each pair, by a strength for each block (by its id)."""

    def attention(block: Any, stream: Stream, rope: Tensor | None, rows: int | None) -> tuple[Tensor, Residual]:
        if (strength := strengths.get(id(block))) is not None:
            source, target, perturbed = stream.sum().unflatten(0, (-1, 3)).unbind(1)  # [n, N, D] each
            neighbour = (torch.arange(len(target), device=target.device) ^ 1).clamp(max=len(target) - 1)
            perturbed = perturbed + strength * (target[neighbour] - perturbed).detach()
            stream = Stream(torch.stack([source, target, perturbed], dim=1).flatten(0, 1))
        return self_attention(block, stream, rope, rows)

    return attention


def refinement(plain: Tensor, perturbed: Tensor, confidence: float) -> Tensor:
    """Logits, [B, K] twice -> the divergence of one prediction from the other, which is drawn."""
    forward = torch.rand((), device=plain.device) <= 0.5
    log_p, log_q = (x.float().log_softmax(dim=1) for x in (plain, perturbed))
    log_p, log_q = torch.where(forward, log_p, log_q), torch.where(forward, log_q, log_p)
    counts = (log_p.detach().exp().amax(dim=1) > confidence).float()  # [B]
    return (counts * (log_p.exp() * (log_p - log_q)).sum(dim=1)).sum() / (counts.sum() + 1e-6)


class SafeTraining(nn.Module):
    """When to go back: the distinct classes in target batches, in parts of this period and of the one before."""

    classes: Tensor  # [2, PARTS] their sum over the steps of a part: in the last period and in this one
    steps: Tensor  # [2, PARTS]
    state: Tensor  # [4] in periods: where this one begins, where r rises from, how long it rises, the last return

    def __init__(self, period: float) -> None:
        super().__init__()
        self.period = period
        self.register_buffer("classes", torch.zeros(2, PARTS))
        self.register_buffer("steps", torch.zeros(2, PARTS))
        self.register_buffer("state", torch.tensor([0.0, 0.0, 1.0, 0.0]))

    def strength(self, progress: Tensor) -> Tensor:
        """r"""
        _, start, rise, _ = self.state
        return torch.sin(((progress / self.period - start) / rise).clamp(0, 1) * math.pi / 2)

    def count(self, logits: Tensor, progress: Tensor) -> None:
        """Count the classes of a step, [B, K] of the target."""
        distinct = torch.zeros_like(logits[0]).scatter(0, logits.argmax(dim=1), 1.0).sum()
        part = ((progress / self.period - self.state[0]) * PARTS).long().clamp(0, PARTS - 1)
        here = torch.arange(PARTS, device=logits.device) == part
        self.classes[1] += here * distinct
        self.steps[1] += here

    def look_back(self, progress: Tensor) -> tuple[Tensor, Tensor]:
        """Before a step: whether a period has ended, and whether fewer classes were predicted in it."""
        this, start, rise, last = self.state
        now = (progress / self.period + 1e-4).floor()
        ended = now > this
        failed = ended & self.fell() & (self.strength(progress) > 0.1)
        rise = torch.where(failed & (now - last <= rise), 2 * rise, rise)
        start, last = (torch.where(failed, now, place) for place in (start, last))
        self.state.copy_(torch.stack([torch.where(ended, now, this), start, rise, last]))
        for counted in (self.classes, self.steps):
            good = torch.where(failed, counted[0], counted[1])
            counted.copy_(torch.where(ended, torch.stack([good, torch.zeros_like(good)]), counted))
        return ended, failed

    def fell(self) -> Tensor:
        """Whether an average of this period is more than 1 below the one before it."""
        fell = torch.zeros((), dtype=torch.bool, device=self.steps.device)
        for parts in (2**level for level in range(5)):
            classes, steps = (x.unflatten(1, (parts, -1)).sum(dim=2).flatten() for x in (self.classes, self.steps))
            mean, long = (classes / steps.clamp(min=1))[parts - 1 :], (steps >= MEANINGFUL)[parts - 1 :]
            fell = fell | ((mean[:-1] - mean[1:] > 1) & long[:-1] & long[1:]).any()
        return fell
