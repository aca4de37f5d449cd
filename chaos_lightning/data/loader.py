"""Divides the batches of the user's DataLoader among the present members.

Theory of operation. `ElasticLoader` wraps the loader that the user wrote for one machine and yields this member's
micro-batches: for each accumulation `view.accumulate` of them, idle ones (a dummy batch, `current.idle`) where nothing
was assigned to it. Who gets what is pure (`planning/assignment.py`), when an accumulation begins and ends is
bookkeeping (`accumulations.py`), which samples an epoch has in which order is `order.py`, and the fetching with all
workers and prefetching is `feeds.py`. The training loop reads `current` for the weight of a batch and `spent()` for its
contribution; the loader learns what was committed from the next header, by itself. The epoch is over when the header's
ledger says so, never sooner, whatever `len()` foresaw.

Modes. "shared": one data set, every member has all of it; the ledger's stream "" makes every sample be used in
exactly one committed step. "local": each member has data of its own, any iterable; its stream bears its name, its
length is announced in the ledger (for an iterable: once it has run dry), and the epoch is over when everybody's
data are spent. Members that are through sooner are idle until then; one that comes in the middle of an epoch brings
all of its data into it.

What drop_last means here: see `planning/assignment.py`. At most (smallest quota - 1) samples of an epoch are unused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from chaos_lightning.data.accumulations import UNKNOWN_LENGTH, Accumulations, Part, Resumed
from chaos_lightning.data.feeds import IterableFeed, MapFeed, StepFeed, batch_length, declared_batch
from chaos_lightning.data.order import Orders
from chaos_lightning.data.source import AssignmentSource, MicroBatch, Stats
from chaos_lightning.data.taped import TapeOrders
from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.planning import ledger, orders
from chaos_lightning.planning.tape import Tape
from chaos_lightning.protocol.spans import normalise
from chaos_lightning.protocol.types import NO_VIEW, Ledger, Member, Spent, View

_log = logging.getLogger(__name__)

_VERSION = 1


class ElasticLoader:
    """Loader of one member's share of the job's data, as micro-batches.

    Args:
        loader: Loader of the user. mode="shared" needs a torch DataLoader over a map-style data set, "local" takes any
            iterable.
        mode: Kind of data: "shared" by all members, or "local", of each member's own.
        seed: Seed of the order of every epoch; equal on all members.
        source: the job.
        tape: Tape of what is leased to the members together, where others share the data with them; epochs are tapes
            then.
        as_lightning: see `Orders`. Not with a tape: other clusters may be in another epoch than the script's hooks.
        least: Fewest samples that the model trains on at once; equal on all members.
        unfetched: Micro-batches are assigned, and None is yielded for each. `data/steps.py` fetches them by `feed`.

    Attributes:
        loader: the user's loader.
        stats: counters.
        current: what was yielded last; None before the first batch of a pass.
        yielded: micro-batches of the present epoch that were yielded.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        mode: Literal["shared", "local"],
        seed: int,
        source: AssignmentSource,
        tape: Callable[[], Tape | None] | None = None,
        as_lightning: bool = False,
        least: int = 1,
        unfetched: bool = False,
    ) -> None:
        if mode not in ("shared", "local"):
            raise ConfigurationError(f"data={mode!r}; expected 'shared' or 'local'")
        self.loader = loader
        self.stats = Stats()
        self.current: MicroBatch | None = None
        self._mode = mode
        self._seed = seed
        self._source = source
        self._stream = ledger.SHARED if mode == "shared" else source.name
        self._least = least
        self._unfetched = unfetched
        self._resumed = Resumed()
        self._units: Orders | TapeOrders | None = None
        self._feed: MapFeed | IterableFeed
        if isinstance(loader, DataLoader) and (mode == "shared" or _has_positions(loader)):
            orders_of_epochs = Orders(
                loader, seed=seed, stream=self._stream, as_lightning=as_lightning and tape is None
            )
            self._units = orders_of_epochs if tape is None else TapeOrders(orders_of_epochs, tape)
            self._feed = (StepFeed if unfetched else MapFeed)(loader, self._units, seed=seed, stats=self.stats)
        elif mode == "shared":
            raise UnsupportedError(
                f"the training loader is a {type(loader).__name__}, whose samples have no positions that members could "
                'share. Use a torch DataLoader over a map-style dataset, or data="local" if each node has its own data.'
            )
        else:
            self._feed = IterableFeed(loader, seed=seed, stats=self.stats)
        self._pass: _Pass | None = None
        self._newest: _Pass | None = None
        self._accumulations: Accumulations | None = None
        self._finished = False
        self._epoch: int | None = None
        self._wanted: int | None = None
        self._loaded: tuple[int, int, bool] | None = None
        self._order_there = (0, "")
        """Epoch in whose midst the state was that was loaded, and the hash of its order there."""
        self.yielded = 0
        self._resync = True
        self._told = False

    # --- iterating ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Begins a pass over one epoch; does nothing until the first batch is requested."""
        self._newest = _Pass(self)
        return self._newest

    def __len__(self) -> int:
        """Returns the number of micro-batches in this pass: those yielded, and those to come if the members stay the
        same.

        Changes with the members, so whoever keeps it must ask again after each header. With mode="local" it is one
        accumulation more than yielded as long as somebody's length is not known.
        """
        if self._accumulations is not None and self._newest is self._pass:
            return self.yielded if self._finished else self.yielded + self._accumulations.left()
        epoch = self._next_epoch()
        return self._start_count(epoch) + self._make_accumulations(epoch).left()

    def foreseen(self, members: int) -> int:
        """Estimates the value of `len` in a job of this many members, before the job is joined."""
        return -(-len(self) // members)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass. By default it is the ledger's, then one more after each pass."""
        self._wanted = epoch

    def give_up(self) -> None:
        """Ends the pass early: uncommitted batches count as unused, and the next pass is over the next epoch."""
        self._accumulations = self._pass = self.current = None

    def close(self) -> None:
        """Ends the DataLoader's workers, persistent ones too. A state saved afterwards has the position of the last
        pass.
        """
        self._feed.close()
        self._loaded = self._stands()
        self._accumulations = self._pass = self._newest = None

    # --- what the training loop reads --------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the present pass, or of the next one if none has begun."""
        return self._next_epoch() if self._accumulations is None or self._epoch is None else self._epoch

    @property
    def quota(self) -> int:
        """Number of units in a micro-batch of this member, as its Hello states."""
        return self._units.quota if self._units is not None else 1

    @property
    def drops(self) -> bool:
        """Whether the user's loader drops a short last batch (drop_last)."""
        units = self._units
        return units.drops if isinstance(units, TapeOrders) else units is not None and units.drop_last

    @property
    def batch(self) -> int:
        """Number of samples in a micro-batch of this member; 0 if the loader does not declare it."""
        return self._units.batch if self._units is not None else declared_batch(self.loader)

    @property
    def stream(self) -> str:
        """Name under which the ledger counts this member's samples: "" for data that members share."""
        return self._stream

    def length(self, epoch: int) -> int | None:
        """Returns the length of this member's stream in an epoch (samples, or batches of a batch sampler); None if only
        its end will show.
        """
        return self._units.length(epoch) if self._units is not None else None

    @property
    def at_safe_point(self) -> bool:
        """Whether all that was yielded is committed, so that a joiner may enter now."""
        return self._accumulations is None or self._accumulations.at_safe_point

    @property
    def uncommitted(self) -> int:
        """Number of micro-batches that were handed out but are not committed yet."""
        return self._accumulations.uncommitted if self._accumulations is not None else 0

    @property
    def ledger(self) -> Ledger:
        """Spent positions, according to the last header and the checkpoint from which the job resumed."""
        return self._resumed.united(self._source.header)

    def epoch_spent(self) -> bool:
        """Returns whether the present epoch is over, according to the last header."""
        accumulations = self._accumulations or self._make_accumulations(self._next_epoch())
        return accumulations.over()

    def spent(self) -> tuple[Spent, ...]:
        """Returns the positions that a contribution made now would spend: those yielded but in no committed header.

        The same until a step commits, empty after it; so a second optimizer's step on the same batch spends nothing.
        """
        accumulations = self._accumulations
        if accumulations is None:
            return ()
        entries = accumulations.pending()
        name = self._source.name
        if (
            self._mode == "local"
            and accumulations.length != UNKNOWN_LENGTH
            and ledger.announced_length(accumulations.ledger, name, accumulations.epoch) is None
        ):
            entries += (ledger.announce_length(name, accumulations.epoch, accumulations.length),)
        return entries

    @property
    def order(self) -> str:
        """Text that identifies the present epoch's order of samples; equal on all members that share the data."""
        if self._mode == "local" or self._units is None or self._accumulations is None:
            return ""
        epoch = self._accumulations.epoch
        return f"epoch {epoch} in order {self._units.order_hash(epoch)}"

    # --- for whoever fetches by himself ------------------------------------------------------------------------

    @property
    def feed(self) -> StepFeed:
        """Feed that fetches what this loader assigns, for a caller that fetches by itself (`unfetched`)."""
        assert isinstance(self._feed, StepFeed)
        return self._feed

    @property
    def units(self) -> Orders:
        """Orders of the epochs, for a caller that fetches by itself (`unfetched`)."""
        assert isinstance(self._units, Orders)
        return self._units

    def steps(self) -> Iterator[tuple[Part, ...]]:
        """Yields this member's micro-batches in the present step, and in each later one if every step commits."""
        assert self._accumulations is not None
        return self._accumulations.upcoming()

    @property
    def as_forecast(self) -> bool:
        """Whether the present step has the micro-batches that `steps` yielded for it before."""
        return self._accumulations is not None and self._accumulations.as_forecast

    # --- agreement and resume ----------------------------------------------------------------------------------

    @property
    def order_fingerprint(self) -> dict[str, str]:
        """Settings of the data, by name, that must be equal on all members; part of the job's fingerprint."""
        words = {"data.mode": self._mode, "data.order_version": orders.VERSION}
        if self._mode == "shared" and self._units is not None:
            return words | self._units.fingerprint()
        return words | {"data.seed": str(self._seed)}

    def state_dict(self) -> dict[str, Any]:
        """Returns the data's state at the last header as plain values, for checkpoints (protocol.md 27) and joiners."""
        ruling = self._source.ruling_view or self._resumed.ruling(self._source.header)
        stands = self._stands()
        return {
            "version": _VERSION,
            "mode": self._mode,
            "order": self._identity(),
            "epoch": stands[0],
            "yielded": stands[1],
            "finished": stands[2],
            "ledger": [[s.stream, s.epoch, [list(span) for span in s.spans]] for s in self.ledger.streams],
            "epoch_order": self._order_within(stands[0]) if stands[1] and not stands[2] else "",
            "head": self._source.header.hash,
            "ruling": None
            if ruling is None
            else {
                "accumulate": ruling.accumulate,
                "members": [[member.id, member.name, member.quota] for member in ruling.members],
            },
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Checks that this loader can resume from a saved state.

        Raises:
            ConfigurationError: the state is of another version, mode or order: its positions mean other samples.
        """
        for field, mine in (("version", _VERSION), ("mode", self._mode), ("order", self._identity())):
            if state.get(field) != mine:
                raise ConfigurationError(
                    f"the data's saved state has {field} {state.get(field)!r}, this loader {mine!r}: the positions "
                    "that it calls spent would be other samples here. Resume with the same data set, sampler and seed."
                )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state from `state_dict`, whatever the number of members.

        The next pass is what was left of that one, be it nothing, or the next epoch's if that one had come to its end.
        An iterator that exists already goes on with it.

        Raises:
            ConfigurationError: see `check_state`.
        """
        self.check_state(state)
        self._order_there = (state["epoch"], state.get("epoch_order", ""))
        spent = Ledger(
            tuple(Spent(stream, epoch, normalise((a, b) for a, b in spans)) for stream, epoch, spans in state["ledger"])
        )
        ruling = state["ruling"]
        view = None
        if ruling is not None:
            members = tuple(Member(i, name, "", "", 0, quota=quota) for i, name, quota in ruling["members"])
            view = View(NO_VIEW, NO_VIEW, members, accumulate=ruling["accumulate"])
        self._resumed.load(spent, state["head"], view)
        self._loaded = (state["epoch"], state["yielded"], state["finished"])
        self._wanted = None
        self._pass = self._accumulations = self.current = None
        self._finished = False

    # --- inside ------------------------------------------------------------------------------------------------

    def _order_within(self, epoch: int) -> str:
        """Returns the hash of an epoch's order if the user's sampler drew it; "" if it follows from seed and epoch."""
        if self._order_there[0] == epoch and self._order_there[1]:
            return self._order_there[1]  # no pass has begun here since
        return self._units.drawn_hash(epoch) if isinstance(self._units, Orders) else ""

    def _begin_order(self, epoch: int) -> None:
        """Fixes the order of an epoch; if the epoch is resumed in its middle, checks that the sampler gives the same
        order again.
        """
        if not isinstance(self._units, Orders):
            return
        self._units.begin(epoch)
        theirs = self._order_there[1] if self._order_there[0] == epoch else ""
        self._order_there = (epoch, "")
        if theirs and (mine := self._order_within(epoch)) != theirs:
            raise ConfigurationError(
                f"epoch {epoch} is under way in order {theirs}, and the sampler gives order {mine} here, so some of "
                "its samples would never be trained and others twice. The order must follow from the seed and the "
                "epoch alone (draw from torch's generator, or implement set_epoch), not from losses or other state; or "
                "go on from a checkpoint of an epoch's end"
            )

    def _identity(self) -> str:
        if self._mode == "local":
            return "local"
        return "/".join(self.order_fingerprint.values())

    def _stands(self) -> tuple[int, int, bool]:
        """Returns the present epoch, its number of committed micro-batches, and whether it is finished."""
        if self._accumulations is not None and self._epoch is not None:
            return (self._epoch, self.yielded - self._accumulations.uncommitted, self._finished)
        return self._loaded or (self._next_epoch(), 0, False)

    def _next_epoch(self) -> int:
        if self._wanted is not None:
            return self._wanted
        if self._loaded is not None:
            return self._loaded[0] + self._loaded[2]
        if self._epoch is not None:
            return self._epoch + 1
        stood = ledger.epoch_of(self.ledger, self._stream)
        if stood is None:
            return 0
        return stood + 1 if self._make_accumulations(stood).over() else stood

    def _start_count(self, epoch: int) -> int:
        return self._loaded[1] if self._loaded is not None and self._loaded[0] == epoch else 0

    def _make_accumulations(self, epoch: int) -> Accumulations:
        length = self.length(epoch)
        if length is None:
            said = ledger.announced_length(self.ledger, self._source.name, epoch)
            length = UNKNOWN_LENGTH if said is None else said
        made = Accumulations(
            self._source,
            stream=self._stream,
            epoch=epoch,
            length=length,
            drop_last=self._units is not None and self._units.drop_last,
            least=self._least if self._units is not None and self._units.unit == "sample" else 1,
            resumed=self._resumed,
            quota=self.quota,
        )
        made.whole = self._unfetched
        return made

    def _begin(self, new: _Pass) -> Accumulations:
        if self._source.view is None:
            raise RuntimeError("the training loader was asked for a batch before this member joined a view")
        epoch = self._next_epoch()
        stood = ledger.epoch_of(self.ledger, self._stream)
        if stood is not None and stood > epoch:
            raise ConfigurationError(
                f"a pass over epoch {epoch} was asked for, but the job's data stand in epoch {stood} already; "
                f"set_epoch({stood}) or later"
            )
        self._begin_order(epoch)
        accumulations = self._make_accumulations(epoch)
        self.yielded = self._start_count(epoch)
        self._pass, self._accumulations, self._epoch = new, accumulations, epoch
        self._wanted = self._loaded = self.current = None
        self._finished = False
        self._resync = True
        self._feed.open(f"{self._source.name}/{epoch}")
        return accumulations

    def _next(self, caller: _Pass) -> Any:
        accumulations = self._accumulations
        if caller is not self._pass or accumulations is None:
            if caller is not self._newest:
                raise RuntimeError("a later pass over this loader has begun; an earlier one cannot go on")
            accumulations = self._begin(caller)
        if isinstance(self._units, TapeOrders):
            accumulations.length = self._units.length(accumulations.epoch)
        part = None if self._finished else accumulations.advance()
        if part is None:
            self._finished = True
            raise StopIteration
        try:
            data, samples = self._fetch(accumulations, part)
        except BaseException:
            accumulations.failed(part.spans)
            self._resync = True
            raise
        self.current = replace(part, samples=samples, spans=part.spans if samples else ())
        self.yielded += 1
        self.stats.yielded += 1
        self.stats.idle += self.current.idle
        return data

    def _fetch(self, accumulations: Accumulations, part: MicroBatch) -> tuple[Any, int]:
        feed = self._feed
        if isinstance(feed, IterableFeed):
            return self._fetch_ordinal(feed, accumulations, part)
        if self._unfetched:
            return None, feed.samples((part.epoch, part.spans))
        if self._resync or (part.first and not accumulations.as_forecast):
            feed.resync(accumulations.future())
            self._resync = False
        if not part.spans:
            return feed.dummy(part.epoch), 0
        tag = (part.epoch, part.spans)
        data = feed.fetch(tag)
        if self.stats.discarded and not self._told:
            self._told = True
            _log.info("batches drawn ahead are thrown away when members come or go; their samples are assigned again")
        return data, feed.samples(tag)

    def _fetch_ordinal(self, feed: IterableFeed, accumulations: Accumulations, part: MicroBatch) -> tuple[Any, int]:
        if not part.spans:
            return feed.dummy(part.epoch), 0
        ((number, stop),) = part.spans
        if stop - number != 1:
            raise ConfigurationError(
                f"this member's quota is {stop - number} batches of its own iterable; expected 1 (ElasticLoader.quota)"
            )
        unspent = ledger.remaining(accumulations.ledger, accumulations.stream, accumulations.epoch, UNKNOWN_LENGTH)
        try:
            data = feed.fetch(number, unspent[0][0])
        except IndexError:
            assert feed.length is not None
            accumulations.ran_dry(feed.length)
            return feed.dummy(part.epoch), 0
        if feed.length is not None and accumulations.length == UNKNOWN_LENGTH:
            accumulations.ran_dry(feed.length)
        return data, batch_length(data)


class _Pass:
    """Iterator over one epoch."""

    def __init__(self, owner: ElasticLoader) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._owner._next(self)


def _has_positions(loader: DataLoader[Any]) -> bool:
    return not isinstance(loader.dataset, IterableDataset) and type(loader).__iter__ is DataLoader.__iter__
