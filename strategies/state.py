"""Defines the training state of a Lightning fit that donors publish and newcomers take over (protocol.md 15, 21).

Theory of operation. Tensors: the module's parameters and buffers, the optimizers' state, and modules that callbacks
average. Everything else is the manifest: optimizer layout, schedulers, gradient scaler, loops' counters, callbacks,
what has been logged in this epoch, and what the module itself puts into checkpoints. A part that cannot travel is
refused with its path, such as `callbacks.MyCallback.buffer`, on the donor, when somebody joins.

Callbacks give `state_dict()`. For Lightning's own ones that is not always enough: how many collectives a
ModelCheckpoint runs depends on private counters, so these travel too. A callback that keeps more can say so by
overriding `state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.trainer.call import _call_callbacks_state_dict, _call_lightning_module_hook
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from chaos_lightning.data.steps import JobLoader
from chaos_lightning.errors import NotNowError, StateError
from chaos_lightning.replication.access import (
    StateAccess,
    module_extra,
    optimizer_manifest,
    rest_tensors,
    restore_module_extra,
    restore_optimizers,
    state_tensors,
)
from chaos_lightning.replication.table import StateTable
from chaos_lightning.strategies import results
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.loops import adopt_loops, loops_manifest, reload_epochs, rolled_back
from chaos_lightning.strategies.metrics import is_metrics

PRIVATE: dict[type[Callback], tuple[str, ...]] = {
    ModelCheckpoint: (
        "dirpath",
        "current_score",
        "_last_global_step_saved",
        "_last_checkpoint_saved",
        "_defer_save_until_validation",
    ),
    WeightAveraging: ("_latest_update_epoch",),
}
"""Attributes that Lightning's own callbacks keep beside `state_dict()` and decide by."""

OWN = (SpikeDetection,)
"""Callbacks whose state is each member's own: this one watches the losses of its own samples, and cannot load what it
saves (Lightning 2.6)."""


class LightningState:
    """Training state of one Trainer (implements `StateAccess`).

    Args:
        trainer: Trainer in fit, set up.
        loader: This member's training loader.
        reduce: Function that `self.log(sync_dist=True)` syncs with.
        extra: Functions by name that return, at the donor, what else travels.
        adopt_extra: Function that takes over, at the newcomer, what `extra` returned.
        beside: Further state that all members hold alike, with tensors of its own.
        reload: Function that makes this member's loaders anew if the donor's were made in another epoch; gets the
            epochs of its own.
        rest: Names of the buffers that all members have, where they own parts of the model: this is the rest then
            (replication/part_state.py). None: all own all of it.
    """

    def __init__(
        self,
        trainer: Trainer,
        loader: JobLoader,
        reduce: Callable[..., Any],
        extra: Mapping[str, Callable[[], Any]],
        adopt_extra: Callable[[Mapping[str, Any]], None],
        beside: StateAccess | None = None,
        reload: Callable[[tuple[float, float]], None] | None = None,
        rest: Collection[str] | None = None,
    ) -> None:
        self._trainer = trainer
        self._rest = None if rest is None else frozenset(rest)
        self.loader = loader
        self._reduce = reduce
        self._extra = extra
        self._adopt_extra = adopt_extra
        self._beside = beside
        self._reload = reload
        self.ended = False
        """Whether the state that was taken over ends with an epoch's last batch, so that what follows it is to be
        made up for.
        """
        self.within_step = False
        """Whether a batch is under way. What is taken over then is of the header on which this member stands, so its
        counters are those that are here: only tensors may differ. What is given away has the counters of before the
        batch.
        """
        self.meeting = ""
        """Name of the collective that is under way between two steps. A member that takes the state over then does not
        know which hooks the others have behind them, and cannot go on with them."""

    # ------------------------------------------------------------------ tensors

    def _averages(self) -> dict[str, nn.Module]:
        """Returns the copies of the model in callbacks, such as those of an exponential moving average."""
        found = {}
        for place, callback in enumerate(self._trainer.callbacks):
            for name, value in vars(callback).items():
                if (
                    isinstance(value, nn.Module)
                    and value is not self._trainer.lightning_module
                    and not is_metrics(value)
                ):
                    found[f"callback{place}.{name}"] = value
        return found

    def tensors(self) -> list[tuple[str, Tensor]]:
        module, optimizers = self._trainer.lightning_module, self._trainer.optimizers
        if self._rest is None:
            found = state_tensors(module, self._averages(), optimizers)
        else:
            found = rest_tensors(module, self._rest, optimizers)
        return found if self._beside is None else [*found, *self._beside.tensors()]

    # ------------------------------------------------------------------ the rest, at the donor

    def manifest(self) -> dict[str, object]:
        trainer = self._trainer
        module = trainer.lightning_module
        return {
            "optimizers": [optimizer_manifest(o, rest=self._rest is not None) for o in trainer.optimizers],
            "modules": {"": module_extra(module), **{n: module_extra(m) for n, m in self._averages().items()}},
            "frozen": [n for n, p in module.named_parameters() if not p.requires_grad],
            "eval": [n for n, m in module.named_modules() if not m.training],
            "schedulers": [_cloned(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
            "precision": _cloned(trainer.precision_plugin.state_dict()),
            "callbacks": {str(c.state_key): state for c in trainer.callbacks if (state := _callback_state(c))},
            "module": self._module_keys(),
            "datamodule": _cloned(trainer.datamodule.state_dict()) if trainer.datamodule is not None else {},
            "loops": {**self._loops(), "ended": self.ended},
            "meeting": self.meeting,
            "results": results.collections_manifest(trainer),
            "loader": self.loader.state_dict(),
            "extra": {name: get() for name, get in self._extra.items()},
            "beside": self._beside.manifest() if self._beside is not None else {},
        }

    def _loops(self) -> dict[str, Any]:
        found = loops_manifest(self._trainer)
        return rolled_back(found, self.loader.uncommitted) if self.within_step else found

    def _checkpoint_stub(self) -> dict[str, Any]:
        """Returns the content of a checkpoint of this moment, which is given to the module's `on_save_checkpoint`."""
        trainer = self._trainer
        stub: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": version("lightning"),
            "state_dict": trainer.lightning_module.state_dict(),
            "loops": trainer._checkpoint_connector._get_loops_state_dict(),
            "callbacks": _call_callbacks_state_dict(trainer),
            "optimizer_states": [trainer.strategy.optimizer_state(o) for o in trainer.optimizers],
            "lr_schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        }
        if scaling := trainer.precision_plugin.state_dict():
            stub[trainer.precision_plugin.__class__.__qualname__] = scaling
        return stub

    def _module_keys(self) -> dict[str, Any]:
        """Returns the keys that the module's `on_save_checkpoint` adds to a checkpoint, with their values."""
        if not is_overridden("on_save_checkpoint", self._trainer.lightning_module):
            return {}
        stub = self._checkpoint_stub()
        standard = set(stub)
        _call_lightning_module_hook(self._trainer, "on_save_checkpoint", stub)
        return {k: _cloned(v) for k, v in stub.items() if k not in standard}

    # ------------------------------------------------------------------ the newcomer

    def prepare(self, manifest: Mapping[str, Any], table: StateTable) -> None:
        restore_optimizers(self._trainer.optimizers, manifest["optimizers"], rest=self._rest is not None)
        if self._beside is not None:
            self._beside.prepare(manifest["beside"], table)

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        if self.within_step:
            return
        if (meeting := manifest.get("meeting", "")) != self.meeting:
            raise NotNowError(
                f"the others are in the collective {meeting!r}, which no newcomer can take part in; this process comes "
                "again until it is over. If no plan fits without it, they wait for links or machines that come back"
            )
        trainer = self._trainer
        module = trainer.lightning_module
        restore_optimizers(trainer.optimizers, manifest["optimizers"], rest=self._rest is not None)
        modules = {"": module, **self._averages()}
        for name, extra in manifest["modules"].items():
            if name not in modules:
                raise StateError(f"the donor has the averaged model {name!r}, this member has {sorted(modules)}")
            restore_module_extra(modules[name], extra)
        frozen, evaluating = set(manifest["frozen"]), set(manifest["eval"])
        for name, param in module.named_parameters():
            param.requires_grad_(name not in frozen)
        for name, child in module.named_modules():
            child.training = name not in evaluating
        _check_count("learning rate schedulers", manifest["schedulers"], trainer.lr_scheduler_configs)
        for config, state in zip(trainer.lr_scheduler_configs, manifest["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        if manifest["precision"]:
            trainer.precision_plugin.load_state_dict(manifest["precision"])
        made_in = reload_epochs(trainer)
        adopt_loops(trainer, manifest["loops"])
        if self._reload is not None:
            self._reload(made_in)
        self.ended = bool(manifest["loops"].get("ended"))
        for callback in trainer.callbacks:
            if isinstance(callback, OWN):
                callback.running_mean.to(trainer.strategy.root_device)  # it does so itself in an epoch's first batch
            if str(callback.state_key) in manifest["callbacks"]:
                _adopt_callback(callback, manifest["callbacks"][str(callback.state_key)])
        if manifest["module"]:
            _call_lightning_module_hook(
                trainer, "on_load_checkpoint", {**self._checkpoint_stub(), **manifest["module"]}
            )
        if trainer.datamodule is not None and manifest["datamodule"]:
            trainer.datamodule.load_state_dict(manifest["datamodule"])
        results.adopt_collections(trainer, manifest["results"], self._reduce)
        self.loader.load_state_dict(manifest["loader"])
        if self._beside is not None:
            self._beside.adopt(manifest["beside"])
        self._adopt_extra(manifest["extra"])


class KeptState:
    """State that the last member saves: with the counters as before the micro-batches that no step has used.

    Args:
        state: State of this member.
        batches: Number of these micro-batches.
        ended: Whether it is kept at the end of an epoch, after its last batch.
    """

    def __init__(self, state: LightningState, batches: int, *, ended: bool = False) -> None:
        self._state = state
        self._batches = batches
        self._ended = ended
        self.tensors, self.prepare, self.adopt = state.tensors, state.prepare, state.adopt

    def manifest(self) -> dict[str, object]:
        manifest = self._state.manifest()
        batches = 0 if self._state.within_step else self._batches  # else they are rolled back already
        return {**manifest, "loops": rolled_back(manifest["loops"], batches, ended=self._ended), "meeting": ""}  # type: ignore[arg-type]


def _check_count(what: str, theirs: Any, mine: Any) -> None:
    if len(theirs) != len(mine):
        raise StateError(f"the donor has {len(theirs)} {what}, this member {len(mine)}; start it with the same script")


def _callback_state(callback: Callback) -> dict[str, Any]:
    if isinstance(callback, OWN):
        return {}
    private = {
        name: getattr(callback, name) for kind, names in PRIVATE.items() if isinstance(callback, kind) for name in names
    }
    state = callback.state_dict()
    if not state and not private:
        return {}
    return {"state": _cloned(state), "private": _cloned(private)}


def _adopt_callback(callback: Callback, given: Mapping[str, Any]) -> None:
    for name, value in given["private"].items():
        setattr(callback, name, value)
    if not given["state"]:
        return
    try:
        callback.load_state_dict(given["state"])
    except (LookupError, TypeError, AttributeError) as error:
        raise StateError(
            f"{type(callback).__name__}.load_state_dict cannot take what state_dict gave at another member "
            f"({type(error).__name__}: {error}); start this member with the same script, or mend the callback"
        ) from error


def _cloned(value: Any) -> Any:
    """Returns the value with its tensors cloned, since a donor trains on while the bytes are sent."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {k: _cloned(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cloned(v) for v in value)
    return value
