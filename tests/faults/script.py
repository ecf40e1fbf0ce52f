"""A user's script whose run is disturbed: it goes on from a checkpoint, trains, validates, saves, exports and ends.

The argument is a plan in JSON, see ``Plan``. Faults come from hooks of the script, none from the package.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import hashlib
import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lt_zero
from tests.faults.script_nets import batch_of, net_of
from tests.faults.script_points import CALLS, PLAN, at, phase, rank_of, watch_files

SAVE_EVERY = 2


# ---- what is trained -------------------------------------------------------------------------------------------------


def watch(first: nn.Module, later: nn.Module) -> None:
    """Make forward and backward of two parts of a net, of those that this rank has, points of the run."""
    entered = 0

    def forward(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal entered
        if not module.training:
            at("validation")
        elif torch.is_grad_enabled():  # not to find shapes
            entered += 1
            if entered == 1:
                at("first forward")
            if entered == 2:
                at("forward")
                output.register_hook(lambda grad: at("backward"))

    def began(module: nn.Module, args: Any, output: Tensor) -> None:
        if entered == 1 and output.requires_grad:  # what is behind it in the net is reduced when its backward begins
            output.register_hook(lambda grad: at("reduction"))

    later.register_forward_hook(forward)
    first.register_forward_hook(began)


def loss_of(net: Any, step: int, rank: int) -> Tensor:
    loss: Tensor = net(**batch_of(PLAN.mesh, 1000 * step + rank))
    return loss


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: at("step"))
    return optimizer


def tell(net: nn.Module, step: int) -> None:
    """Print what the weights of this rank have come to."""
    with torch.no_grad(), lt_zero.gathered(net):
        values = b"".join(_own(p).numpy().tobytes() for p in net.parameters())
    line = {"rank": rank_of(), "step": step, "sum": hashlib.sha256(values).hexdigest()[:16]}
    print("RESULT " + json.dumps(line), flush=True)


def _own(parameter: nn.Parameter) -> Tensor:
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def keep(step: int) -> None:
    """Copy the first checkpoint of an undisturbed run, from which others go on."""
    if PLAN.point == "none" and step == SAVE_EVERY and rank_of() == 0:
        copy = shutil.copytree if os.path.isdir(PLAN.last) else shutil.copy
        copy(PLAN.last, f"{PLAN.folder}/base")


# ---- the faces -------------------------------------------------------------------------------------------------------


def run_trainer() -> None:
    from tests.faults.script_trainer import fit

    fit(partial(net_of, PLAN.mesh, 0.2, watch), optimizer_of, tell, keep)


def run_fabric() -> None:
    import lightning as L

    strategy = lt_zero.FabricZeroStrategy(config={"zero_optimization": PLAN.zero, **PLAN.more})
    fabric: Any = L.Fabric(accelerator="cpu", devices=PLAN.ranks, strategy=strategy)
    fabric.launch()
    at("set-up")
    net = net_of(PLAN.mesh, 0.0, watch)
    model, optimizer = fabric.setup(net, optimizer_of(net))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    CALLS["save"] = partial(fabric.save, PLAN.alone, state)
    CALLS["export"] = partial(strategy.export, model, f"{PLAN.alone}.safetensors")
    CALLS["barrier"] = fabric.barrier
    CALLS["broadcast"] = partial(fabric.broadcast, 1)
    at("ready")
    if (found := _found()) is not None:
        with phase("load"):
            fabric.load(found, state)
    for step in range(state["step"], PLAN.until):
        model.train()
        fabric.backward(loss_of(model, step, strategy.distributed_sampler_kwargs["rank"]))
        at("clip")
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0:
            _validate(model, step)
            state["step"] = step + 1
            with phase("save"):
                fabric.save(PLAN.last, state)
            keep(step + 1)
    with phase("export"):
        fabric.strategy.export(model, f"{PLAN.folder}/weights.safetensors")
    tell(net, PLAN.until)
    at("teardown")


def run_loop() -> None:
    lt_zero.init_distributed()
    at("set-up")
    net = net_of(PLAN.mesh, 0.0, watch)
    config = {"zero_optimization": PLAN.zero, "gradient_clipping": 1.0, **PLAN.more}
    engine: Any = lt_zero.initialize(model=net, optimizer=optimizer_of(net), config=config)[0]
    CALLS["save"] = partial(engine.save_checkpoint, PLAN.folder, "alone")
    CALLS["export"] = partial(engine.save_16bit_model, PLAN.folder, "alone.safetensors")
    CALLS["barrier"] = dist.barrier
    CALLS["broadcast"] = partial(dist.broadcast_object_list, [1], 0)
    at("ready")
    begin = 0
    if (found := _found()) is not None:
        with phase("load"):
            begin = engine.load_checkpoint(PLAN.folder, Path(found).name)[1]["step"]
    for step in range(begin, PLAN.until):
        engine.train()
        engine.backward(loss_of(engine, step, engine.session.division.data_rank))
        at("clip")
        engine.step()
        if (step + 1) % SAVE_EVERY == 0:
            _validate(engine, step)
            with phase("save"):
                engine.save_checkpoint(PLAN.folder, "last", client_state={"step": step + 1})
            keep(step + 1)
    with phase("export"):
        engine.save_16bit_model(PLAN.folder, "weights.safetensors")
    tell(net, PLAN.until)
    at("teardown")
    engine.destroy()


def _found() -> str | None:
    """The checkpoint to go on from."""
    from lt_zero.checkpoint.native.directory import find

    found = find(PLAN.last)
    return found if Path(found).exists() else None


def _validate(model: Any, step: int) -> None:
    model.eval()
    with torch.no_grad():
        loss_of(model, step, 7)


def run_all(run: Callable[[], None]) -> None:
    """Call ``run``; before that so many times as ``PLAN.tries`` says with the fault, whose error is caught."""
    fault = PLAN.fault
    for _ in range(PLAN.tries):
        PLAN.fault = fault
        try:
            run()
        except BaseException as error:
            text = " ".join(str(error).split())
            print(f"CAUGHT {type(error).__name__}: {text}", flush=True)
        os.environ.pop("FAULT", None)
        gc.collect()
        print(f"KEPT {json.dumps([len(os.listdir(f'/proc/self/{kind}')) for kind in ('fd', 'task')])}", flush=True)
    if PLAN.tries:
        PLAN.fault = ""
    run()
    if PLAN.point == "after":
        at("after")
        CALLS["barrier"]()


def _redirect() -> None:
    """Give this rank a log of its own."""
    with open(f"{PLAN.logs}/rank{rank_of()}.log", "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    _redirect()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    watch_files()
    atexit.register(at, "exit")
    at("start")
    run_all({"trainer": run_trainer, "fabric": run_fabric, "loop": run_loop}[PLAN.face])
