"""Any combination of model, data, strategy and accelerator, put together by Hydra from `chaos_lightning.configs`.

    python examples/train.py                                         # small CNN on digits, this machine alone
    python examples/train.py experiment=gpt_text strategy.endpoint=HOST:29400
    python examples/train.py accelerator=gpu data=fashion_mnist callbacks=faults
    python examples/train.py -m model.lr=0.01,0.05 seed=1,2          # a sweep: one training after the other
    python examples/train.py --cfg job                               # show the configuration and stop
    torchrun --rdzv-backend=chaos --rdzv-endpoint=HOST:29400 --nnodes=1:16 --max-restarts=9 \
        examples/train.py experiment=gpt_text

Every member of a job must be started with the same choices; what may differ is `strategy.name` and the accelerator's
device. An own project uses the same groups with `config_path="pkg://chaos_lightning.configs"`, or adds them to its own
by `hydra.searchpath=[pkg://chaos_lightning.configs]`; the groups `model` and `data` name `chaos_lightning.examples`.
"""

from __future__ import annotations

import hydra
from hydra.utils import instantiate
from lightning import seed_everything
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="pkg://chaos_lightning.configs", config_name="config")
def main(config: DictConfig) -> float | None:
    """Trains once; returns the metric named by `monitor`, for sweepers that look for its minimum."""
    seed_everything(config.seed)
    trainer = instantiate(
        config.trainer,
        strategy=instantiate(config.strategy),
        callbacks=[instantiate(callback, _convert_="all") for callback in config.callbacks.values()],
    )
    trainer.fit(instantiate(config.model), instantiate(config.data))
    metric = trainer.callback_metrics.get(config.monitor)
    return None if metric is None else float(metric)


if __name__ == "__main__":
    main()
