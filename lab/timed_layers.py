"""Model of layers whose passes take a given time: real tensors, little arithmetic, and sleep until a deadline.

Theory of operation. A benchmark of pipelines needs as many devices as there are stages. Processes that compute share
the cores of this machine; processes that sleep do not. So a `TimedLayer` has real weights, outputs and gradients, and a
forward or a backward pass ends at a deadline, however little there was to compute. What a pipeline adds to these times
is real: border tensors, reductions, commits, moves of weights and optimizer state. `TimedModel.job` describes the model
to the planner, with the times that layers were given and bytes that are exact.

Times are met as long as arithmetic and wake-ups fit in: 10 ms and more for a pass on a machine that is not crowded.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from chaos_lightning.planning.pipelines.job import Device, Layer, TrainingJob
from lab.timed_layer import TimedLayer

PARAMETERS = 3
"""Number of parameters of a layer; AdamW counts steps in four bytes for each."""


class TimedModel(LightningModule):  # type: ignore[misc]
    """Model of equal timed layers in a row, trained with AdamW.

    Args:
        layers: Number of layers.
        width: Features; a layer has width * (width + 1) + 1 numbers.
        forward_s: Seconds of a layer's forward pass of one micro-batch.
        backward_s: Seconds of its backward pass.
    """

    chaos_chain = "layers"

    def __init__(self, layers: int, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.count, self.width, self.forward_s, self.backward_s = layers, width, forward_s, backward_s

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            made = (TimedLayer(self.width, self.forward_s, self.backward_s) for _ in range(self.count))
            self.layers = nn.ModuleList(made)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        loss = x.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def job(self, *, micro_batches: int, samples: int, owned: float) -> TrainingJob:
        """Returns the description of the model for the planner, with its layers' times and sizes; see `alike`."""
        numbers, wide = self.width * (self.width + 1) + 1, 4 * samples * self.width
        layer = Layer(
            name="layers",
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            parameter_nbytes=4 * numbers,
            gradient_nbytes=4 * numbers,
            optimizer_nbytes=8 * numbers + 4 * PARAMETERS,
            activation_nbytes=2 * wide,
            output_nbytes=wide,
        )
        return alike(layer, self.count, micro_batches=micro_batches, samples=samples, owned=owned)


def alike(layer: Layer, count: int, *, micro_batches: int, samples: int, owned: float) -> TrainingJob:
    """Returns the planner's description of a job whose layers are all equal to the given one.

    Args:
        layer: Any one of the layers.
        count: Number of layers.
        micro_batches: Micro-batches of a step.
        samples: Samples in a micro-batch.
        owned: Number of layers that fit on a device, with two micro-batches in flight.
    """
    nbytes = layer.parameter_nbytes + 3 * layer.gradient_nbytes + layer.optimizer_nbytes + 2 * layer.activation_nbytes
    return TrainingJob(
        layers=tuple(replace(layer, name=f"{layer.name}.{i}") for i in range(count)),
        devices=(Device(name="d", memory_nbytes=round(owned * nbytes)),),
        micro_batches=micro_batches,
        samples=samples,
    )
