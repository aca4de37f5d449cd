"""Provides the Lightning strategies, which translate Lightning's hooks into calls of the engine.

Theory of operation. `strategy` says what each hook of Lightning means, and `companion` serves those that no strategy
gets. A `session` is one fit's part in a job: it owns the engine, and decides what happens at a safe point, in a slot
and at the end. What it decides from belongs to its parts:

- `stepping`: the accumulation of a step, weights, averaging; `manual`: averages of manual optimization;
- `collectives`, `results`, `evaluation`: what members exchange, what `self.log` keeps, validation that is divided;
- `pipeline_logs`, `pipeline_evaluation`: the same where layers lie at several members;
- `writer`, `saving`: who logs and writes files; checkpoints;
- `data`, `lengths`, `schedules`: the training loader, how long an epoch is, schedules by samples;
- `state`, `loops`, `replay`: what a newcomer takes over, and how it replays steps;
- `fingerprint`, `refusals`: what must be equal on all members, what no job can serve;
- `environment`, `place`, `preparing`: who this process is, also before its first batch, and when it prepares data.

`pipeline` is the strategy whose members own parts of the model: `pipeline_fit` is one fit's part in it,
`pipeline_model` the user's model, `pipeline_logs` what its steps log.

`diloco` is the third strategy: a Trainer as one cluster of an outer job. `outer_fit` is one fit's part in it,
`outer_clock` keeps Lightning's counters by the job's clock, `outer_refusals` says what no cluster can serve. `elastic`
is the part in it of a rank, where a cluster is itself a job of `chaos`.

None of these but `saving` knows the session; it gives them what they need.
"""

if __name__ != "chaos_lightning.strategies":
    raise ImportError(
        f"this folder was imported as {__name__!r}; write `import chaos_lightning.strategies` "
        "(the folder at the root of the repository is the same one, under a name that would load everything twice)"
    )

from chaos_lightning.errors import needing
from chaos_lightning.outer.cluster.strategy_options import DiLoCoOptions
from chaos_lightning.settings import ChaosOptions

with needing("chaos_lightning.strategies (ChaosStrategy, ChaosPipelineStrategy, DiLoCoStrategy)"):
    from chaos_lightning.strategies.diloco import DiLoCoStrategy
    from chaos_lightning.strategies.pipeline import ChaosPipelineStrategy
    from chaos_lightning.strategies.schedules import BySamples
    from chaos_lightning.strategies.strategy import ChaosStrategy

__all__ = ["BySamples", "ChaosOptions", "ChaosPipelineStrategy", "ChaosStrategy", "DiLoCoOptions", "DiLoCoStrategy"]
