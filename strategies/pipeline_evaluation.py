"""Validates during fit when members own different layers: in rounds of forward passes, each closed by a collective.

Theory of operation (protocol.md P17). Every member iterates the same loaders, and a round has as many batches as a step
has micro-batches. Lightning's loop asks for batch after batch, so the first one of a round has the whole round run:
`RoundFeed`, in place of the fetcher's iterator, fetches a round's batches together and hands them out one by one. Units
run the user's `validation_step` over the routes of training. What it logs and returns goes to all members with the
collective that closes the round. Each later call of the round is answered from there: values are logged, and outputs
handed to hooks, when Lightning's loop comes to their batch. So each batch counts once, as in one process.

A failure begins the open round anew (P7). The engine's units put metrics back to their values at its start, and each
unit gets a fresh copy of its batch. A member that is gone takes along what it had counted in metrics in closed rounds,
as in 29.

Three things differ from one process. `on_validation_batch_start` comes after its batch has run, but for the first batch
of a round. Attributes that `validation_step` sets are set at last stages alone: outputs are to be collected in
`on_validation_batch_end`, which all members run. And the model is called once in `validation_step`, as in
`training_step`, so `generate()` is refused there.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import xxhash
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.trainer.call import _call_strategy_hook
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils._pytree import tree_iter
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from chaos_lightning.errors import StateError, UnsupportedError, WireError
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.unit_steps import Attempt, UnitsDone
from chaos_lightning.membership.parts import division
from chaos_lightning.pipeline.absent import is_absent, named_tensors
from chaos_lightning.pipeline.executor import SlotAttempt
from chaos_lightning.pipeline.step import PipelineStep
from chaos_lightning.planning.pipelines.units import FORWARD, coverage
from chaos_lightning.protocol.types import View
from chaos_lightning.replication.payload import decode_payload, encode_payload
from chaos_lightning.strategies.evaluation import whole
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.metrics import metrics_of
from chaos_lightning.strategies.pipeline_logs import UnitLogs

MAX_OUTPUTS_NBYTES = 1 << 20
"""Most bytes of outputs of `validation_step`, together, that one round sends to all members."""
_ALONE = "in a process that holds the whole model: Trainer(strategy='auto').validate(model, ckpt_path=...)"
_ADVICE = (
    "validation_step runs in stages, as training_step does: it calls the model once, and uses what the last layers "
    f"give. generate(), and other loops over the model, run after fit or beside it {_ALONE}. limit_val_batches=0 "
    "leaves validation out of fit"
)
_log = logging.getLogger("chaos_lightning")

Fetched = tuple[Any, int, int]
"""A batch as Lightning's fetcher gives it: batch, number of the batch, number of the loader."""


class BatchAnswer(NamedTuple):
    """Results of one validation batch, equal at all members.

    Attributes:
        logged: Bytes of what was logged, for `UnitLogs.replay`.
        output: Value that `validation_step` returned.
        missing: Reason why the output was not sent, and is None here; "" otherwise.
    """

    logged: bytes
    output: Any
    missing: str


@dataclass(eq=False)
class RoundBatch:
    """One batch of a round, which is the set of batches whose forward passes run together.

    Attributes:
        batch: A copy of what the loader gave: Lightning's hooks, or user code, may change that in place.
        round: All batches of the round.
        answer: Results of the batch, once the round is closed.
    """

    batch: Any
    batch_idx: int
    dataloader_idx: int
    round: list[RoundBatch]
    answer: BatchAnswer | None = None


@dataclass(frozen=True)
class StepArguments:
    """Arguments of `validation_step` for one micro-batch of a round."""

    micro_batch: int
    values: tuple[Any, ...]


class RoundFeed:
    """Iterator over the batches of a validation pass, which fetches them a round at a time.

    A round ends with its loader: values of a loader are computed before the next one begins.

    Args:
        fetch: Lightning's iterator over all loaders.
        most: Batches of a round.
        left: Number of batches that are still to be fetched; None: unknown.
        begun: Batches that were fetched before, and will be evaluated first.

    Attributes:
        due: Batches that were handed out and not evaluated, in order.
    """

    def __init__(
        self, fetch: Iterator[Fetched], most: int, left: int | None = None, begun: Sequence[Fetched] = ()
    ) -> None:
        self._fetch, self._most, self._left = fetch, most, left
        self._ahead: list[Fetched] = []
        self._waiting: deque[tuple[Fetched, RoundBatch]] = deque()
        self.due: deque[RoundBatch] = deque()
        if begun:
            self._begin_round(begun)
            for _ in begun:
                next(self)

    def __iter__(self) -> RoundFeed:
        return self

    def __next__(self) -> Fetched:
        if not self._waiting:
            self._begin_round(())
        if not self._waiting:
            raise StopIteration
        fetched, batch = self._waiting.popleft()
        self.due.append(batch)
        return fetched

    def _begin_round(self, begun: Sequence[Fetched]) -> None:
        found, self._ahead = [*begun, *self._ahead], []
        while len(found) < self._most and (following := self._next()) is not None:
            if found and following[2] != found[0][2]:
                self._ahead.append(following)
                break
            found.append(following)
        the_round: list[RoundBatch] = []
        the_round += [RoundBatch(copy.deepcopy(batch), n, loader, the_round) for batch, n, loader in found]
        self._waiting.extend(zip(found, the_round, strict=True))

    def _next(self) -> Fetched | None:
        if self._left == 0:
            return None
        if self._left is not None:
            self._left -= 1
        return next(self._fetch, None)


class PipelineEvaluation:
    """Validation of one fit with pipelines.

    Args:
        trainer: Trainer in fit.
        gather: Has units make the payloads of a collective, given its name and the order of samples (session.py).
            Returns them by member; None if this member is out of the job.
        engine: Returns this member's engine.
        step: Returns this member's part of steps.
        logs: Record of what the hook `validation_step` logs.
        is_last: `LayerChain.is_last`: whether the unit under way runs the last layer.
    """

    def __init__(
        self,
        trainer: Trainer,
        gather: Callable[[str, Attempt, str], Mapping[str, bytes] | None],
        engine: Callable[[], Engine],
        step: Callable[[], PipelineStep],
        logs: UnitLogs,
        is_last: Callable[[], bool],
    ) -> None:
        self._trainer, self._gather, self._engine, self._step = trainer, gather, engine, step
        self._logs, self._is_last = logs, is_last
        self._feed = RoundFeed(iter(()), 1)
        self._evaluated: Counter[str] = Counter()
        """Batches of this pass whose last layers ran at each member."""
        self._told: set[str] = set()

    @property
    def _loop(self) -> _EvaluationLoop:
        return self._trainer.fit_loop.epoch_loop.val_loop

    # ------------------------------------------------------------------ what Lightning calls

    def begin(self) -> None:
        """Begins a validation pass over the loaders (called by the strategy's `on_validation_start`).

        Raises:
            UnsupportedError: `validation_step` fetches its batches itself.
        """
        fetcher, view = self._loop._data_fetcher, self._engine().view
        assert view is not None
        assert not torch.is_inference_mode_enabled(), "prepare_validation was not called"
        if not isinstance(fetcher, _PrefetchDataFetcher):
            raise UnsupportedError(
                "validation_step(dataloader_iter) is not supported by pipelines: batches are fetched in rounds, before "
                "it runs; take `batch` as an argument"
            )
        if is_overridden("on_validation_batch_start", self._trainer.lightning_module):
            self._tell(
                "validation runs in rounds of as many batches as a step has micro-batches: on_validation_batch_start "
                "comes after validation_step of its batch, but for the first batch of a round"
            )
        assert fetcher.iterator is not None
        left = None if fetcher.length is None else fetcher.length - fetcher.fetched
        self._feed = RoundFeed(fetcher.iterator, _micro_batches(view), left, fetcher.batches)
        fetcher.iterator = self._feed
        self._evaluated.clear()

    def step(self) -> Any:
        """Returns the output of `validation_step` for the next batch, after logging what that call has logged.

        It is the strategy's `validation_step`. The first batch of a round has the round run.

        Raises:
            StopIteration: This member is out of the job: it ends Lightning's loop over batches.
            Exception: Whatever `validation_step` raised in a unit that ran here, or what ended the job.
        """
        due = self._feed.due.popleft()
        if due.answer is None:
            self._run(due.round)
        if due.answer is None:
            raise StopIteration
        self._logs.replay({0: due.answer.logged}, {})
        return due.answer.output

    # ------------------------------------------------------------------ a round

    def _run(self, these: Sequence[RoundBatch]) -> None:
        first, last = these[0], these[-1]
        where = f" of loader {first.dataloader_idx}" if self._loop.num_dataloaders > 1 else ""
        name = f"validation batches {first.batch_idx} to {last.batch_idx}{where}"
        order = f"{name} of content {content_hash(batch.batch for batch in these)}"
        said = self._gather(name, partial(self._attempt, these), order)
        if said is not None:
            self._take(these, name, said)

    def _attempt(self, these: Sequence[RoundBatch], view: View, seq: int) -> UnitsDone:
        """Runs this member's units of a round, as one attempt."""
        self._logs.forget()
        pipelines = division(view).pipelines
        assert pipelines is not None
        batch = partial(self._arguments, these)
        empty = range(len(these), _micro_batches(view))
        member = self._engine().member_id
        try:
            sums = self._step().evaluate(SlotAttempt(view.id, seq), pipelines, member, empty, batch, self._call)
        except UnsupportedError as error:
            error.add_note(_ADVICE)
            raise
        most = MAX_OUTPUTS_NBYTES // len(these)
        said = {j: [self._logs.extra(j), *_travelling(output, most)] for j, output in sums.results.items()}
        return UnitsDone(
            weight=0.0,
            presence=b"",
            micro_batches=((0, len(these)),),
            coverage=coverage((time.unit for time in sums.times), FORWARD),
            payload=encode_payload(said) if said else b"",
        )

    def _arguments(self, these: Sequence[RoundBatch], j: int) -> StepArguments:
        """Returns the arguments that Lightning would give to `validation_step`, made from a copy of the batch, since
        a unit may run again.
        """
        trainer, loop, given = self._trainer, self._loop, these[j]
        batch = trainer.precision_plugin.convert_input(copy.deepcopy(given.batch))
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=given.dataloader_idx)
        batch = _call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=given.dataloader_idx)
        several = loop._is_sequential and loop.num_dataloaders > 1
        kwargs = loop._build_kwargs(batch, given.batch_idx, given.dataloader_idx if several else None)
        return StepArguments(j, loop._build_step_args_from_hook_kwargs(kwargs, "validation_step"))

    def _call(self, given: StepArguments) -> Any:
        """Runs the user's `validation_step` within a unit, and records what it logs."""
        module: LightningModule = self._trainer.lightning_module
        with self._logs.unit(given.micro_batch, self._is_last()):
            return module.validation_step(*given.values)

    def _take(self, these: Sequence[RoundBatch], name: str, said: Mapping[str, bytes]) -> None:
        """Stores the members' results of a round in its batches."""
        device = self._trainer.strategy.root_device
        for member, data in said.items():
            for j, answer in _read_answers(data, device).items():
                if not 0 <= j < len(these) or these[j].answer is not None:
                    raise WireError(f"{member} answers for batch {j} of {name}, which it did not run")
                these[j].answer = answer
                self._evaluated[member] += 1
                if answer.missing:
                    self._tell(
                        f"validation_step returns what is not sent to the other members ({answer.missing}); hooks get "
                        "None for it at all members. Return less, or collect it with self.log or in a metric"
                    )
        if silent := [j for j, batch in enumerate(these) if batch.answer is None]:
            raise StateError(f"nobody answers for batches {silent[:8]} of {name}; please report this")
        for member in [m for m in self._evaluated if m not in said]:
            count = self._evaluated.pop(member)
            if metrics_of(self._trainer):
                _log.warning(
                    "%s died during validation: metrics that validation_step updates miss the %d batches that it had "
                    "counted; what is logged as a number misses nothing", member, count,
                )  # fmt: skip

    def _tell(self, text: str) -> None:
        """Warns, but only once with the same text."""
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=3)


def _micro_batches(view: View) -> int:
    """Returns how many batches a round has in this view."""
    pipelines = division(view).pipelines
    assert pipelines is not None
    return pipelines.plan.micro_batches


def _travelling(output: Any, most_nbytes: int) -> tuple[Any, str]:
    """Returns (output, "") if `validation_step`'s output can be sent to all members, else (None, reason)."""
    try:
        nbytes = len(encode_payload(output))
    except StateError as error:
        return None, str(error)
    if nbytes > most_nbytes:
        return None, f"{nbytes} bytes, of which at most {most_nbytes} are sent"
    return output, ""


def _read_answers(data: bytes, device: torch.device) -> dict[int, BatchAnswer]:
    """Decodes one member's results of a round, by batch.

    Raises:
        WireError: The bytes are something else.
    """
    found = decode_payload(data, device) if data else {}
    if type(found) is not dict or any(type(row) is not list or len(row) != 3 for row in found.values()):
        raise WireError("malformed results of a round of validation; expected three entries for each batch")
    answers = {j: BatchAnswer(*row) for j, row in found.items()}
    for j, answer in answers.items():
        if (type(j), type(answer.logged), type(answer.missing)) != (int, bytes, str):
            raise WireError("malformed results of a round of validation; expected a number, bytes, an output and text")
    return answers


def content_hash(batches: Iterable[Any]) -> str:
    """Returns a hash (16 hex digits) of the values in these batches, to detect stages that see different batches."""
    state = xxhash.xxh3_64()
    for leaf in tree_iter(list(batches)):
        if not isinstance(leaf, Tensor):
            plain = isinstance(leaf, str | bytes | int | float | None)
            state.update(repr(leaf if plain else type(leaf).__name__).encode())
            continue
        state.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
        if leaf.layout is torch.strided and leaf.numel():
            flat = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            state.update(flat.view(torch.uint8).numpy().data)
    return str(state.hexdigest())


# --- around fit --------------------------------------------------------------------------------------------------


def same_everywhere(loader: Any) -> Any:
    """Returns a validation loader over all samples, which yields the same batches at all members.

    Raises:
        UnsupportedError: The loader shuffles, so that members would draw other batches.
    """
    loader = whole(loader)
    if isinstance(loader, DataLoader) and isinstance(
        loader.sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler
    ):
        raise UnsupportedError(
            f"a loader of validation draws its samples by chance ({type(loader.sampler).__name__}), and all stages of "
            "a pipeline must see the same batches; give it shuffle=False"
        )
    return loader


def prepare_validation(trainer: Trainer) -> None:
    """Prepares the Trainer for validation in rounds, before fit (called in the strategy's `setup`).

    Validation does not run in inference mode: parts of the model may move meanwhile, and are trained with later. And
    none runs before training: members have not met by then, and none of them holds all layers.
    """
    trainer.fit_loop.epoch_loop.val_loop.inference_mode = False
    if trainer.num_sanity_val_steps:
        _log.info("validation is not tried before training (num_sanity_val_steps): layers lie at several members")
        trainer.num_sanity_val_steps = 0


def refuse_freed(module: nn.Module, what: str) -> None:
    """Refuses to run the whole model after fit has freed the layers that other members own.

    Args:
        module: The user's module.
        what: The Trainer's function, such as "test".

    Raises:
        UnsupportedError: The module is not whole.
    """
    absent = [name for name, _, _, tensor in named_tensors(module) if is_absent(tensor)]
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise UnsupportedError(
            f"trainer.{what} runs the whole model in one process, and fit has freed the layers that other members hold "
            f"({', '.join(absent[:3])}{more}). Make the model anew and give a checkpoint, {_ALONE}"
        )
