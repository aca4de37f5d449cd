"""Tests that a step's micro-batches are those of plain Lightning with `accumulate_grad_batches`."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from step_job import StepJob
from test_elastic_loader import Numbers
from torch.utils.data import DataLoader, Sampler


class EachEpochsOwn(Sampler):
    def __init__(self, length):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self):
        return self.length


class Records(LightningModule):
    """LightningModule that records the samples of each batch, grouped by optimizer step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.steps, self.open = [], []

    def training_step(self, batch):
        self.open.append(batch.tolist())
        return self.weight * batch.sum()

    def on_before_optimizer_step(self, optimizer):
        self.steps.append(self.open)
        self.open = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


@pytest.mark.filterwarnings(
    "ignore:The .train_dataloader. does not have many workers",
    "ignore:The number of training",
    "ignore:.isinstance.treespec, LeafSpec",
)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [29, 32, 48, 7])
def test_plain_lightning_sees_the_same(length, drop_last, tmp_path):
    def loader(name="a"):
        return DataLoader(Numbers(length), batch_size=4, sampler=EachEpochsOwn(length), drop_last=drop_last)

    module = Records()
    trainer = Trainer(
        accelerator="cpu",
        accumulate_grad_batches=3,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader())
    assert not module.open
    job = StepJob(loader, "ab", micro_batches=3)
    steps = []
    for _ in range(2):
        for step in job.loaders["a~1"]:
            steps.append([step.batch(j).tolist() for j in range(3) if j not in step.empty])
            job.commit(spent=[spent for j in range(3) for spent in step.spent(j)])
    assert steps == module.steps
    assert len(steps) == trainer.global_step
