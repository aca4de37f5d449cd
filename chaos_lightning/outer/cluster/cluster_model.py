"""Holds what a cluster has in memory: its model, the base, the residual and the pushes.

Theory of operation. *Freezing* copies the parameters (f, fp32); the push is encoded from base, f and residual beside
the training. *Adopting* is theta <- theta_v + (theta - f) (docs/outer.md, O9), with the base in place of f where no
push was accepted since the last adoption; taken outright it is theta <- theta_v. All of it is a function of the
parameters and of the order of the effects. So processes with equal parameters that carry out the same effects between
the same steps hold the same bits.

Where something is judged between two steps, the model shows its base, and its own parameters wait.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.exchange.codec import Codec, Format, Part
from chaos_lightning.outer.exchange.kernel import freeze, settle
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.types import PushAnswer, PushId

RESETS = 2
"""Number of rejections in a row at which the inner optimizer's state is dropped, and again at each doubling."""


class ClusterModel:
    """Model of a cluster, with its base, residual and pushes. Only the training thread may call methods.

    Args:
        replica: Part of the model that clusters exchange.
        grid: Division of that part into blocks.
        codec: Formats in which pushes and versions are sent.

    Attributes:
        grid: Division into blocks, as given.
        codec: Formats, as given.
        base: Version that was adopted last, as received.
        residual: Amount that the codec has left out of the pushes so far.
        frozen: Parameters (f) of the push that was frozen last, until the adoption after its answer.
        pending: Name of the push that was frozen last, until it is answered.
        pushes: Encoded bytes of the pushes that are open or kept.
        rejections: Number of pushes in a row that were rejected.
    """

    def __init__(self, replica: Replica, grid: Grid, codec: Codec) -> None:
        self.grid, self.codec = grid, codec
        self._replica = replica
        self.base: Part | None = None
        self.residual: Tensor | None = None
        self.frozen: Tensor | None = None
        self.pending: PushId | None = None
        self.pushes: dict[PushId, Part] = {}
        self.rejections = 0
        self._spare: Tensor | None = None
        """Memory for the next f: new memory would keep training for as long as the copy itself."""
        self._own: list[Tensor] | None = None
        """Parameters that are trained, while the model shows the base; else None."""

    def empty(self) -> Part:
        """Returns memory for a version of the whole model, in the codec's format."""
        return Part.empty(self.grid.whole, self.codec.version)

    def format_of(self, *, founding: bool) -> Format:
        """Returns the format of a push: `founding` means the one from which the job's first version is made."""
        return self.codec.version if founding else self.codec.push

    def freeze(self, push: PushId) -> None:
        """Copies the present parameters as the content of a push. The function that `encoder` returns encodes the
        copy.
        """
        self.pending, self.frozen = push, self._replica.read(self.grid, self._spare)
        self._spare = None
        if self.codec.residual and self.residual is None:
            self.residual = self.frozen.new_zeros(self.frozen.shape)

    def encoder(self) -> Callable[[], Part]:
        """Returns a function that encodes the push that was frozen last. Any thread may call it until that push is
        answered.

        It has references of its own, since the incarnation may end meanwhile. It raises ConfigurationError if no job
        can begin with the content.
        """
        base, frozen, residual = self.base, self.frozen, self.residual
        assert frozen is not None

        def encode() -> Part:
            if base is None and (names := self._replica.not_finite(frozen, self.grid)):
                raise ConfigurationError(f"no job can begin with what is not finite: {', '.join(names)}")
            if base is None or self.codec.parameters:
                return Part.encoded(self.grid.whole, self.format_of(founding=base is None), frozen)
            part = Part.empty(self.grid.whole, self.codec.push)
            freeze(base, frozen, part, residual)
            return part

        return encode

    def settle(self, push: PushId, answer: PushAnswer) -> None:
        """Updates the residual after the answer to a push (O10): dropped by a rejection, reduced to what the codec left
        out by an acceptance.
        """
        if answer is PushAnswer.REJECTED:
            self.residual = None
            self.rejections += 1
        elif answer is PushAnswer.ACCEPTED:
            self.rejections = 0
        if push != self.pending:
            return  # opened again by a rollback: what the codec left out of it was kept when it was first accepted
        if answer is not PushAnswer.ACCEPTED:
            self.frozen = None
        elif self.residual is not None and self.base is not None:
            assert self.frozen is not None
            settle(self.base, self.frozen, self.pushes[push], self.residual)
        self.pending = None

    @property
    def resets_optimizer(self) -> bool:
        """Returns whether the inner optimizer's state must be cleared, too, after this many rejections in a row (O10).

        Not at each one: a cold optimizer may be what makes pushes too long, and needs time. Nor only once: what spoiled
        it may come again.
        """
        return self.rejections >= RESETS and self.rejections & (self.rejections - 1) == 0

    def adopt(self, version: Part, *, outright: bool) -> None:
        """Adopts a version as the base and, with the progress since the freezing added, as parameters; `outright`
        discards that progress.
        """
        since = Part.of(self.grid.whole, self.frozen) if self.frozen is not None else self.base
        self._replica.adopt(version, None if outright else since)
        self.base, self.frozen, self._spare = version, None, self.frozen

    def end_with(self, fetched: Part | None) -> None:
        """Adopts the job's last version and discards all progress: the fetched version, or the base if nothing was
        fetched.
        """
        part = fetched or self.base
        assert part is not None
        self.adopt(part, outright=True)

    def forget(self) -> None:
        """Drops base, residual and frozen push, since a new incarnation has none; the encoded pushes stay."""
        self.base = self.residual = self.frozen = self.pending = None

    # ------------------------------------------------------------------ what is judged

    @property
    def shows_base(self) -> bool:
        """Whether the model's parameters are those of the base at the moment (see `show_base`)."""
        return self._own is not None

    def show_base(self) -> None:
        """Replaces the model's parameters by those of the base until `show_own`; nothing may be trained in between."""
        if self._own is None and self.base is not None:
            self._own = self._replica.copies()
            self._replica.adopt(self.base, None)

    def show_own(self) -> None:
        """Undoes `show_base`: the model has its trained parameters again. Idempotent."""
        if self._own is not None:
            self._replica.restore(self._own)
            self._own = None
