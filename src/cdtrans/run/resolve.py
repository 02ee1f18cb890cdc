"""A run on this machine: what torch, timm and the method must be asked for."""

from dataclasses import asdict

import torch

from cdtrans.config import Config, Resolved, check_options, make_config
from cdtrans.errors import MethodError, SettingsError
from cdtrans.inputs.pixels import resize_for
from cdtrans.methods import METHODS, method_class
from cdtrans.methods.base import Method, Sizes
from cdtrans.network.backbone import native_crop, resolve_name
from cdtrans.network.network import AnyHead, Network
from cdtrans.network.operations import build
from cdtrans.runtime.device import pick_device, pick_precision
from cdtrans.runtime.screen import Screen
from cdtrans.training.loop import step_seed


def resolve(config: Config, method: type[Method] | None = None) -> Resolved:
    """Replace every 'auto' by its value here and write out every option of the method. `method` replaces the class that
    the settings name. Settings that the method cannot work with are refused."""
    kind = method or method_class(config.method)
    options = check_options(kind.Options, config.method_args, config.method)
    if not kind.trains and config.epochs > 1:
        raise SettingsError(
            "no-epochs",
            f"The method '{config.method}' does not train, so --epochs {config.epochs} has no effect; use --epochs 1.",
        )
    if config.batch_size < kind.least_batch:
        raise SettingsError(
            "batch-too-small",
            f"The method '{config.method}' needs a --batch-size of {kind.least_batch} or more, not "
            f"{config.batch_size}.",
        )
    device, backbone = pick_device(config.device), resolve_name(config.backbone)
    crop = native_crop(backbone) if config.crop == "auto" else config.crop
    resize = resize_for(crop) if config.resize == "auto" else config.resize
    here = {"device": str(device), "backbone": backbone, "crop": crop, "resize": resize}
    here |= {"precision": pick_precision(config.precision, device), "method_args": asdict(options)}
    return Resolved(**make_config(config.to_dict() | here).to_dict())


def require_source(kind: type[Method], config: Config) -> None:
    """Refuse a run without source images of a method that needs them."""
    if kind.needs_source and not config.source:
        others = [name for name in METHODS if not method_class(name).needs_source]
        raise SettingsError(
            "no-source",
            f"The method '{config.method}' needs source images and none were given: name them, as in 'cdtrans adapt "
            f"SOURCE TARGET', or use --method {' or '.join(others)}.",
        )


def use_device(config: Resolved, screen: Screen) -> torch.device:
    """The run's device, ready to train on."""
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams and graphs are made on the current one
        if config.precision != "fp32" and (cause := build(device)[1]):
            screen.warn(f"GPU kernels could not be built, so training takes twice as long ({cause}).")
    return device


def make_method(kind: type[Method], network: Network, config: Config, sizes: Sizes) -> Method:
    """The run's seed initialises its modules. A model card must be able to describe the network that it serves."""
    torch.manual_seed(step_seed(config.seed, "method", 0, 0))
    method = kind(network, check_options(kind.Options, config.method_args, config.method), sizes)
    served, own = method.served(), {id(parameter) for parameter in method.parameters()}
    if not isinstance(served.head, AnyHead) or any(id(p) not in own for p in served.parameters()):
        raise MethodError(
            "method-serves-other",
            f"{kind.__name__}.served() must return a Network made of the method's own modules, with a head of "
            "cdtrans.network.network; see docs/methods.md.",
        )
    return method
