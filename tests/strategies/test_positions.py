"""Tests that a position within an epoch is kept when a checkpoint moves between loops that count micro-batches and
loops that count steps.
"""

import copy

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from chaos_lightning.strategies.saving import LOADERS, PROGRESS, convert_position

SAMPLES, BATCH, EACH = 60, 3, 4  # 20 micro-batches, 5 steps an epoch


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.places = []

    def training_step(self, batch, batch_idx):
        self.places.append((self.current_epoch, batch_idx))
        return self.weight * batch.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class SavesOnce(Callback):
    """Callback that writes a checkpoint once, after this many optimizer steps, at a batch's end or at the epoch's
    end.
    """

    def __init__(self, path, steps, *, at_end=False):
        self.path, self.steps, self.at_end = path, steps, at_end

    def on_train_batch_end(self, trainer, *args):
        if not self.at_end and trainer.global_step == self.steps:
            self.write(trainer)

    def on_train_epoch_end(self, trainer, *args):
        if self.at_end and trainer.global_step == self.steps:
            self.write(trainer)

    def write(self, trainer):
        if not self.path.exists():
            trainer.save_checkpoint(self.path)


def fit(where, *callbacks, batch, accumulate, ckpt_path=None, epochs=2):
    model = Model()
    trainer = Trainer(
        accelerator="cpu",
        accumulate_grad_batches=accumulate,
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=where,
    )
    trainer.fit(model, DataLoader(torch.arange(float(SAMPLES)), batch_size=batch), ckpt_path=ckpt_path)
    return model, trainer


def counts(checkpoint):
    progress = checkpoint["loops"]["fit_loop"][PROGRESS]
    return {scope: dict(progress[scope]) for scope in ("current", "total")}


@pytest.fixture
def saved(tmp_path, request):
    """Checkpoints after the same number of steps: of a loop over micro-batches, and of one whose batches are whole
    steps.
    """
    steps, at_end = request.param
    found = []
    for name, batch, accumulate in (("plain", BATCH, EACH), ("steps", BATCH * EACH, 1)):
        path = tmp_path / f"{name}.ckpt"
        fit(tmp_path, SavesOnce(path, steps, at_end=at_end), batch=batch, accumulate=accumulate)
        found.append(torch.load(path, weights_only=False))
    found[1]["loops"]["fit_loop"]["state_dict"][LOADERS] = [{"micro_batches": 5, "yielded": 5 * steps}]
    return found


pytestmark = pytest.mark.filterwarnings(
    "ignore:The .train_dataloader. does not have many workers",
    "ignore:The number of training",
    "ignore:You're resuming from a checkpoint",
    "ignore:Be aware that when using `ckpt_path`",
)


@pytest.mark.parametrize("saved", [(3, False), (5, False), (5, True), (7, False), (10, True)], indirect=True)
def test_counts_are_those_of_a_loop_that_has_always_counted_so(saved):
    plain, steps = saved
    assert counts(plain) != counts(steps)
    assert counts(convert_position(copy.deepcopy(plain), EACH)) == counts(steps)
    back = convert_position(copy.deepcopy(steps), 0, EACH)
    assert counts(back) == counts(plain)
    (state,) = back["loops"]["fit_loop"]["state_dict"][LOADERS]
    assert state == {"yielded": steps["global_step"] * EACH}


@pytest.mark.parametrize("saved", [(3, False)], indirect=True)
def test_who_counts_alike_changes_nothing(saved):
    plain, steps = saved
    assert counts(convert_position(copy.deepcopy(plain), 0, EACH)) == counts(plain)
    assert counts(convert_position(copy.deepcopy(steps), EACH)) == counts(steps)
    assert convert_position({"state_dict": {}}, EACH) == {"state_dict": {}}  # weights only


@pytest.mark.parametrize("saved", [(3, False), (7, False)], indirect=True)
def test_loops_go_on_at_the_same_step(saved, tmp_path):
    plain, steps = saved
    torch.save(convert_position(plain, EACH), tmp_path / "to_steps.ckpt")
    back = convert_position(steps, 0, EACH)
    del back["loops"]["fit_loop"]["state_dict"][LOADERS]  # plain loaders have no state
    torch.save(back, tmp_path / "to_plain.ckpt")
    done = steps["global_step"]
    epoch, step = divmod(done, SAMPLES // BATCH // EACH)
    model, trainer = fit(tmp_path, batch=BATCH * EACH, accumulate=1, ckpt_path=tmp_path / "to_steps.ckpt")
    assert model.places[0] == (epoch, step)
    assert trainer.global_step == done + len(model.places) == 10
    model, trainer = fit(tmp_path, batch=BATCH, accumulate=EACH, ckpt_path=tmp_path / "to_plain.ckpt")
    assert model.places[0] == (epoch, step * EACH)
    assert trainer.global_step == done + len(model.places) // EACH == 10
