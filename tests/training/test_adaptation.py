"""The loop of stage 2, with a network and methods that are made up here: it needs nothing but the seam."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.config import CDTransOptions, Config, make_config
from cdtrans.errors import Hopeless
from cdtrans.inputs.batches import Images, LabelledImages
from cdtrans.methods.base import Batch, Method, NoOptions, Round, Sizes, Update
from cdtrans.methods.cdtrans import CDTrans
from cdtrans.network.encoding import Encoded, Encoder
from cdtrans.network.network import Output
from cdtrans.pairing.narrowing import Numbering
from cdtrans.pairing.pairs import Domains, Pairs, Proposals, proposed
from cdtrans.record.run import RunWriter
from cdtrans.runtime.screen import Screen
from cdtrans.training import adaptation
from cdtrans.training.adaptation import Adaptation, Planner, TrainingData, adapt_to_target, encode_domains
from cdtrans.training.loop import load_stage
from cdtrans.training.optimisation import learning_rate
from cdtrans.trust.selection import Watch
from cdtrans.trust.support import Evidence
from run_folders import DATA
from support import raises
from tiny_task import log_lines

CPU = torch.device("cpu")
SOURCES, TARGETS, FIRST_TARGET = 12, 9, 100
WHOLE = Numbering.of(torch.ones(3, dtype=torch.bool), torch.arange(SOURCES) % 3)  # every class occurs
QUIET = Screen(quiet=True)


def settings(**values: Any) -> Config:
    base = {"device": "cpu", "precision": "fp32", "batch_size": 4, "epochs": 5, "guard": False, "select": "last"}
    return make_config(base | {"rebuild_every": 2, "lr": 0.01, "warmup_epochs": 1} | values)


def numbered(count: int, first: int) -> Images:
    """Image n is first + n all over, so that a crop still tells which image it is of."""
    values = np.arange(first, first + count, dtype=np.uint8)
    pixels = np.broadcast_to(values[:, None, None, None], (count, 6, 6, 3)).copy()
    return Images(pixels, np.arange(count), crop=4, mean=(0.0,) * 3, std=(1.0,) * 3, device=CPU)


def numbers(images: Tensor) -> list[int]:
    return (images.mean(dim=(1, 2, 3)) * 255).round().int().tolist()


class Net(nn.Module):
    """In place of a network. Both domains look alike to it, class by class: the class of image n is n modulo 3, and
    its scores say so, or with a `shift` the next one."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shift, self.leading = shift, 3
        self.backbone = nn.Identity()
        self.head = SimpleNamespace(of_another_domain=lambda out: out)

    def encode(self, images: Tensor) -> Output:
        number = torch.tensor(numbers(images)) % FIRST_TARGET
        feature = F.one_hot(number % 3, 3) + 0.01 * number[:, None]
        return Output(feature, self.scale * 5 * F.one_hot((number + self.shift) % 3, 3))


class Probe(Method):
    """Remembers what it is given. Pairs are those of CDTrans, or the `fixed` ones."""

    def __init__(self, fixed: Proposals | None = None, network: Net | None = None) -> None:
        super().__init__(network or Net(), NoOptions(), Sizes(3, SOURCES, TARGETS))  # type: ignore[arg-type]
        self.fixed = fixed
        self.rounds: list[Round] = []
        self.batches: list[Batch] = []
        self.progress: list[float] = []
        self.values: list[dict[str, float]] = []

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The numbers of the images that it was trained on."""
        return [pair for b in self.batches for pair in zip(numbers(b.x_s), numbers(b.x_t), strict=True)]

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        self.rounds.append(round)
        if self.fixed is not None:
            return self.fixed
        source, target = proposed(domains.neighbours, "two_way", "twice")
        labels, centers = domains.source_labels[source], domains.centers[target]
        return Proposals(source, target, labels, centers, labels == centers)

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        assert self.training
        self.batches.append(batch)
        self.progress.append(float(progress))
        source, target = (self.network.encode(x).logits for x in (batch.x_s, batch.x_t))
        losses = {"loss_source": F.cross_entropy(source, batch.y_s), "loss_target": F.cross_entropy(target, batch.y_t)}
        self.values.append({name: float(loss.detach()) for name, loss in losses.items()})
        return losses


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunWriter]:
    run = RunWriter.open(tmp_path / "run", settings(), DATA)
    yield run
    run.close()


def domains_of_a_run(holdout: bool = False) -> TrainingData:
    images, labels = numbered(SOURCES, 0), torch.arange(SOURCES) % 3
    held = LabelledImages(images, labels) if holdout else None
    return TrainingData(images, labels, numbered(TARGETS, FIRST_TARGET), held)


def adapt(run: RunWriter, method: Method, *, holdout: bool = False, **values: Any) -> Adaptation:
    data, config = domains_of_a_run(holdout), settings(**values)
    encode = Encoder(method.network, config, QUIET)
    domains = encode_domains(encode, data, encode(data.target, "target"))
    evidence = Evidence.of(domains, 3, method.network.leading, pretrained=False)
    return adapt_to_target(run, method, data, evidence, WHOLE, config, QUIET)


def some_pairs(count: int, **more: Any) -> Proposals:
    """As if a plan had made these: the labels differ, so that it shows which side is trained on which."""
    n = torch.arange(count)
    return Proposals(n % SOURCES, n % TARGETS, n % SOURCES % 3, (n % TARGETS + 1) % 3, **more)


# Plans


@pytest.mark.parametrize(("every", "epochs"), [(1, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (3, [1, 4]), (10, [1])])
def test_pairs_are_planned_anew_every_few_epochs_and_written_down(
    run: RunWriter, every: int, epochs: list[int]
) -> None:
    method = Probe()
    adapt(run, method, rebuild_every=every)
    lines = [line for line in log_lines(run.folder) if line["event"] == "pairs"]
    assert [(line["round"], line["epoch"]) for line in lines] == list(enumerate(epochs, 1))
    assert method.rounds == [Round(n, len(epochs), epoch) for n, epoch in enumerate(epochs, 1)]
    assert (method.rounds[0].progress, method.rounds[-1].progress) == (0, float(len(epochs) > 1))
    files = sorted(p.name for p in (run.folder / "pairs").iterdir())
    assert files == [f"round-0{n}.npz" for n in range(1, len(epochs) + 1)]
    with np.load(run.folder / "pairs" / "round-01.npz") as arrays:
        assert set(arrays.files) == {"source", "target", "source_labels", "target_labels", "kept"}
        assert (len(arrays["source"]), arrays["kept"].sum()) == (lines[0]["proposed"], lines[0]["kept"])
        assert (arrays["kept"] == (arrays["source_labels"] == arrays["target_labels"])).all()


def test_what_a_plan_draws_depends_on_seed_and_epoch_and_is_not_drawn_for_the_order(run: RunWriter) -> None:
    drawn: list[list[int]] = []

    class Drawing(Probe):
        def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
            drawn.append(torch.randperm(9, generator=generator).tolist())
            return super().plan(domains, round, generator)

    domains = Domains(Encoded(torch.eye(3), torch.eye(3)), torch.arange(3), Encoded(torch.eye(3), torch.eye(3)))
    for epoch, seed in ((1, 1), (1, 1), (3, 1), (1, 2)):
        Planner(run, Drawing(), WHOLE, settings(seed=seed), QUIET).plan(epoch, domains)
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert drawn[0] != drawn[3]
    order = torch.Generator().manual_seed(adaptation.step_seed(1, "adaptation", 1, 0))
    assert drawn[0] != torch.randperm(9, generator=order).tolist()


@pytest.mark.parametrize("left", [0, 1])
def test_no_pair_left_says_how_many_were_rejected_by_what_and_what_to_try(run: RunWriter, left: int) -> None:
    """Each class is where the other is thought to be, so that no pair, or one, agrees."""
    features = torch.eye(4)[:2].repeat(3, 1)
    labels = torch.tensor([1, 0, 1, 0, 1, 0])
    if left:
        labels[5] = 1  # the last source image is of the class that its nearest target is thought to be
    domains = Domains(Encoded(features, features), labels, Encoded(features, 10 * features))
    method = CDTrans(Net(), CDTransOptions(mutual_pairs="once"), Sizes(2, 6, 6))  # type: ignore[arg-type]
    planner = Planner(run, method, WHOLE, settings(), QUIET)
    proposals = planner.plan(1, domains)
    with raises("training-hopeless"):
        planner.adopt(proposals, 1, CPU)
    assert log_lines(run.folder)[0]["kept"] == left


# Batches


def test_it_trains_on_the_pairs_that_were_kept_and_on_no_others(run: RunWriter) -> None:
    method = Probe()
    adapt(run, method, epochs=1)
    with np.load(run.folder / "pairs" / "round-01.npz") as arrays:
        kept = arrays["kept"]
        targets = (arrays["target"][kept] + FIRST_TARGET).tolist()
        planned = list(zip(arrays["source"][kept].tolist(), targets, strict=True))
    trained = method.pairs
    assert len(trained) == len(planned) // 4 * 4
    assert not set(trained) - set(planned)
    assert trained != planned[: len(trained)], "in another order than planned"
    assert all(trained.count(pair) <= planned.count(pair) for pair in set(trained))


@pytest.mark.parametrize("coupled", [True, False])
def test_index_weight_and_label_are_those_of_the_target_image(run: RunWriter, coupled: bool) -> None:
    method = Probe(some_pairs(9, weight=torch.arange(9) / 10, coupled=coupled))
    adapt(run, method, epochs=2, batch_size=3)
    assert len(method.batches) == 6
    for batch in method.batches:
        index = torch.tensor(numbers(batch.x_t)) - FIRST_TARGET
        assert torch.equal(batch.i_t, index)
        assert torch.equal(batch.weight, index / 10)
        assert torch.equal(batch.y_t, (index + 1) % 3)
        assert torch.equal(batch.y_s, torch.tensor(numbers(batch.x_s)) % 3)


def test_coupled_pairs_stay_together_and_others_are_shuffled_side_by_side(run: RunWriter, tmp_path: Path) -> None:
    together = Probe(some_pairs(9))
    adapt(run, together, epochs=1, batch_size=3)
    assert sorted(together.pairs) == [(n, FIRST_TARGET + n) for n in range(9)]
    assert all(batch.weight.tolist() == [1.0] * 3 for batch in together.batches), "unless the plan says otherwise"

    apart = Probe(some_pairs(9, coupled=False))
    other = RunWriter.open(tmp_path / "apart", settings(), DATA)
    adapt(other, apart, epochs=2, batch_size=3)
    other.close()
    for epoch in (apart.pairs[:9], apart.pairs[9:]):
        sources, targets = zip(*epoch, strict=True)
        assert sorted(sources) == list(range(9)), "each image as often as it was planned"
        assert sorted(targets) == list(range(FIRST_TARGET, FIRST_TARGET + 9))
        assert any(t - s != FIRST_TARGET for s, t in epoch)
    assert set(apart.pairs[:9]) != set(apart.pairs[9:]), "others meet in another epoch"


@pytest.mark.parametrize(
    ("count", "batch", "sizes"),
    [
        (10, 4, 2),  # the last two are left out of this epoch, as the authors do
        (8, 4, 2),
        (3, 64, 1),  # fewer pairs than a batch: a smaller batch
        (2, 64, 1),
    ],
)
def test_batches_are_whole_and_fewer_pairs_than_a_batch_make_a_smaller_one(
    run: RunWriter, count: int, batch: int, sizes: int
) -> None:
    method = Probe(some_pairs(count))
    adapt(run, method, epochs=1, batch_size=batch)
    assert [len(b.x_s) for b in method.batches] == [min(batch, count)] * sizes
    assert all(len(x) == min(batch, count) for b in method.batches for x in b)


# Steps


def test_after_step_follows_every_update_without_gradients(run: RunWriter) -> None:
    order: list[tuple[str, float, bool]] = []

    class Following(Probe):
        def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
            order.append(("step", float(self.network.scale.detach()), torch.is_grad_enabled()))
            return super().losses(batch, progress)

        def after_step(self, batch: Batch, progress: Tensor) -> None:
            order.append(("after", float(self.network.scale.detach()), torch.is_grad_enabled()))
            assert batch is not None
            assert float(progress) == self.progress[-1]
            assert torch.equal(batch.i_t, self.batches[-1].i_t)

    method = Following(some_pairs(9))
    adapt(run, method, epochs=2, batch_size=3)
    assert [(name, grad) for name, _, grad in order] == [("step", True), ("after", False)] * 6
    assert method.progress == pytest.approx([n / 6 for n in range(6)])
    scales = [scale for _, scale, _ in order]
    assert all(scales[i + 1] != scales[i] for i in range(0, 12, 2)), "the update lies between them"
    assert scales[2::2] == scales[1:-1:2], "and nothing afterwards"


class Extended(Probe):
    """With two modules of its own beside the network; the slope of every parameter is 1."""

    def __init__(self, fixed: Proposals | None = None) -> None:
        super().__init__(fixed)
        self.critic, self.other = nn.Linear(1, 1), nn.Linear(1, 1, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def rates(self) -> Mapping[str, float]:
        return {"critic": 10.0, "network": 0.5}

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        super().losses(batch, progress)
        return {"loss": torch.stack([p.sum() for p in self.parameters()]).sum()}

    def after_step(self, batch: Batch, progress: Tensor) -> None:
        self.seen += 1


def test_the_modules_of_a_method_are_optimised_at_their_own_rates(run: RunWriter) -> None:
    method = Extended(some_pairs(9))
    before = {name: x.clone() for name, x in method.state_dict().items()}
    plain = {"momentum": 0.0, "weight_decay": 0.0, "clip_norm": 1000.0, "bias_lr_factor": 2.0, "lr": 0.01}
    adapt(run, method, epochs=2, batch_size=3, **plain)
    moved = {name: float(before[name] - x) for name, x in method.state_dict().items() if name != "seen"}

    def sum_of_rates(rate: float, factor: float = 1.0) -> Any:
        total = sum(3 * learning_rate(epoch, 2, 0.01 * rate, factor, warmup=1) for epoch in (1, 2))
        return pytest.approx(total, rel=1e-4)

    assert moved == {
        "network.scale": sum_of_rates(0.5),
        "critic.weight": sum_of_rates(10.0),
        "critic.bias": sum_of_rates(10.0, factor=2.0),
        "other.weight": sum_of_rates(1.0),
    }
    assert int(method.seen) == 6


def test_several_updates_of_a_step_change_their_own_parameters(run: RunWriter) -> None:
    class InTurn(Extended):
        def train_step(self, batch: Batch, progress: Tensor, update: Update) -> dict[str, Tensor]:
            for module in (self.critic, self.network):
                before = {name: x.clone() for name, x in self.state_dict().items()}
                own = {id(p) for p in module.parameters()}
                loss = self.losses(batch, progress)["loss"]
                update(loss, list(module.parameters()))
                for name, p in self.named_parameters():
                    assert torch.equal(p, before[name]) == (id(p) not in own), name
            return {"loss_last": loss}

    method = InTurn(some_pairs(9))
    other = method.other.weight.clone()
    adapt(run, method, epochs=2, batch_size=3)
    assert torch.equal(method.other.weight, other), "nobody's: not even by weight decay or momentum"
    assert log_lines(run.folder)[-1]["event"] == "scores"
    assert "loss_last" in next(line for line in log_lines(run.folder) if line["event"] == "epoch")


def test_the_log_holds_the_mean_of_each_loss_and_the_pairs_of_every_epoch(run: RunWriter) -> None:
    method = Probe(some_pairs(9))
    adapt(run, method, epochs=2, batch_size=3)
    lines = [line for line in log_lines(run.folder) if line["event"] == "epoch"]
    assert [(line["stage"], line["epoch"]) for line in lines] == [("adaptation", 1), ("adaptation", 2)]
    for line, steps in zip(lines, (method.values[:3], method.values[3:]), strict=True):
        for name in ("loss_source", "loss_target"):
            assert line[name] == pytest.approx(sum(step[name] for step in steps) / 3, rel=1e-4)
        assert line["pairs"] == 9


# Encoding and predictions


def test_every_domain_is_encoded_once_for_what_it_is_needed_for(
    run: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target before the first and after every epoch, the source when pairs are planned and at the end."""
    encoded: list[str] = []
    encode = Encoder.__call__

    def counted(self: Encoder, images: Images, name: str) -> Encoded:
        encoded.append("source" if len(images) == SOURCES else "target")
        assert encoded[-1] == name
        return encode(self, images, name)

    monkeypatch.setattr(Encoder, "__call__", counted)
    adapt(run, Probe(), epochs=4, rebuild_every=2)
    of_evidence = 2
    assert encoded[of_evidence:] == ["target", "source", "target", "target", "source", "target", "target", "source"]


def predictions(run: RunWriter) -> list[list[int]]:
    """Every epoch's predictions, in the order of the target."""
    files = sorted((run.folder / "predictions").iterdir())
    assert [file.name for file in files] == [f"epoch-{n:03}.npz" for n in range(len(files))]
    return [np.load(file)["predicted"].tolist() for file in files]


class Teaching(Probe):
    """Serves another network than it trains: one that says the next class."""

    def __init__(self, fixed: Proposals | None = None) -> None:
        super().__init__(fixed)
        self.teacher = Net(shift=1)
        self.planned_with: list[list[int]] = []

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        self.planned_with.append((domains.target.logits.argmax(dim=1) - torch.arange(TARGETS)).remainder(3).tolist())
        assert (domains.source.logits.argmax(dim=1) - torch.arange(SOURCES)).remainder(3).unique().tolist() == [
            self.planned_with[-1][0]
        ]
        return super().plan(domains, round, generator)

    def after_step(self, batch: Batch, progress: Tensor) -> None:
        self.teacher.scale.lerp_(self.network.scale, 0.5)

    def served(self) -> Net:  # type: ignore[override]
        return self.teacher


def test_the_source_only_network_starts_and_the_served_one_goes_on(run: RunWriter) -> None:
    method = Teaching(some_pairs(9))
    adapted = adapt(run, method, holdout=True, epochs=4, rebuild_every=2)
    right, next_class = ([(n + shift) % 3 for n in range(TARGETS)] for shift in (0, 1))
    assert predictions(run) == [right, *[next_class] * 4]
    assert method.planned_with == [[0] * TARGETS, [1] * TARGETS]
    scores = [line for line in log_lines(run.folder) if line["event"] == "scores"]
    assert [line["holdout"] for line in scores] == [1, 0, 0, 0, 0]
    assert adapted.network is method.teacher  # type: ignore[comparison-overlap]
    assert adapted.before.predicted.tolist() == right
    assert adapted.after is not None
    assert adapted.after.predicted.tolist() == next_class
    assert np.load(run.folder / "predictions" / "epoch-004.npz")["confidence"].shape == (TARGETS,)
    assert torch.equal(adapted.last["scale"], method.teacher.scale)


# Resuming


class Stopped(Exception):
    pass


class Everything(Teaching):
    """All that a state must carry: a module and a buffer of its own, another served network, and random draws. It stops
    after `stop_after` steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.critic = nn.Linear(1, 1)
        nn.init.ones_(self.critic.weight)
        nn.init.zeros_(self.critic.bias)
        self.register_buffer("seen", torch.zeros(TARGETS, dtype=torch.long))
        self.stop_after = stop_after

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        super().plan(domains, round, generator)
        weights = torch.rand(SOURCES, generator=generator)
        proposals = Proposals.at_random(domains, torch.arange(TARGETS), domains.centers, generator)
        return Proposals(**vars(proposals) | {"weight": weights})

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        if len(self.batches) == self.stop_after:
            raise Stopped
        noise = torch.rand(len(batch.weight), 1)
        domain = (batch.weight * self.critic(noise * self.network.scale).square().squeeze(1)).mean()
        return super().losses(batch, progress) | {"loss_domain": domain * (1 + progress)}

    def after_step(self, batch: Batch, progress: Tensor) -> None:
        super().after_step(batch, progress)
        self.seen += batch.i_t.bincount(minlength=TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_stopped_after_any_step_it_continues_as_if_nothing_had_happened(tmp_path: Path, optimizer: str) -> None:
    whole = RunWriter.open(tmp_path / "whole", settings(), DATA)
    undisturbed = Everything()
    how: dict[str, Any] = {"optimizer": optimizer, "save_every": 0, "holdout": True}
    expected = adapt(whole, undisturbed, **how)
    whole.close()
    assert len(undisturbed.batches) == 15
    for stop in range(1, 15):
        run = RunWriter.open(tmp_path / str(stop), settings(), DATA)
        with pytest.raises(Stopped):
            adapt(run, Everything(stop), **how)
        method = Everything()
        result = adapt(run, method, **how)
        run.close()
        assert len(method.batches) == 15 - stop, "what was done is not done again"
        assert len(method.rounds) == sum(first >= stop for first in (0, 6, 12)), "nor planned"
        for name, x in undisturbed.state_dict().items():
            assert torch.equal(method.state_dict()[name], x), name
        assert result.chosen_epoch == expected.chosen_epoch
        assert torch.equal(result.last["scale"], expected.last["scale"])
        assert vars(result.before).keys() == vars(expected.before).keys()
        assert all(torch.equal(x, vars(expected.before)[name]) for name, x in vars(result.before).items())
        for file in sorted(p for p in whole.folder.rglob("*") if p.suffix in (".npz", ".jsonl")):
            if file.name != "timings.jsonl":
                copy = run.folder / file.relative_to(whole.folder)
                assert copy.read_bytes() == file.read_bytes(), file.name


def test_the_state_holds_modules_pairs_and_scores_each_in_the_part_of_its_owner(run: RunWriter) -> None:
    method = Everything(stop_after=8)
    with pytest.raises(Stopped):
        adapt(run, method, save_every=0, holdout=True, select="consensus")
    state = load_stage(run)
    assert state is not None
    parts = state.parts
    assert set(parts) == {"model", "optimisation", "watch", "planner", "memory"}
    assert parts["model"].keys() == method.state_dict().keys()
    assert int(parts["model"]["seen"].sum()) == 8 * 4
    pairs = Pairs(**parts["planner"])
    assert (len(pairs), pairs.coupled) == (SOURCES, False)
    assert set(parts["watch"]["scores"]) == {0, 1, 2}
    assert parts["watch"]["best"]["epoch"] in (1, 2)
    assert parts["watch"]["best"]["weights"].keys() == method.teacher.state_dict().keys()

    planner = Planner(run, Everything(), WHOLE, settings(), QUIET)
    assert planner.state_dict() == {}
    planner.load_state_dict({})
    assert planner.pairs is None
    planner.load_state_dict(parts["planner"])
    assert planner.pairs is not None
    for name, value in vars(pairs).items():
        restored = getattr(planner.pairs, name)
        assert torch.equal(restored, value) if isinstance(value, Tensor) else restored == value, name


# Training that breaks off


@pytest.mark.parametrize("guard", [True, False])
def test_training_that_breaks_off_late_leaves_the_best_epoch_so_far(
    run: RunWriter, monkeypatch: pytest.MonkeyPatch, guard: bool
) -> None:
    record = Watch.epoch

    def breaks_off(self: Watch, epoch: int, *passed: Any) -> None:
        if epoch == 3:
            raise Hopeless("The loss is not finite in the adaptation stage, epoch 3, step 1", "No state was saved.")
        record(self, epoch, *passed)

    monkeypatch.setattr(Watch, "epoch", breaks_off)
    adapted = adapt(run, Probe(), guard=guard)
    assert (adapted.chosen_epoch, adapted.last) == (2, {})
    assert adapted.after is not None
    assert adapted.measures[0].code == "training-broke-off"


def test_training_that_breaks_off_at_once_is_an_error_without_the_guard(
    run: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_off(*anything: Any) -> None:
        raise Hopeless("no pairs", "try others")

    monkeypatch.setattr(adaptation, "require_pairs", breaks_off)
    with pytest.raises(Hopeless):
        adapt(run, Probe(), guard=False)
    adapted = adapt(run, Probe(), guard=True)
    assert (adapted.after, adapted.chosen_epoch) == (None, 0)
    assert [measure.code for measure in adapted.measures] == ["training-broke-off"]
