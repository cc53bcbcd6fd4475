"""Drafts by heads on the target's last hidden state.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
2024. Head i, a residual block x + SiLU(W x + b), guesses from the hidden row that a token was drawn
from the one i + 1 places behind that token, all through the target's own logits matrix; of that
only the rows of common tokens are read (Zhao et al., "FR-Spec", 2025), for its reading is most of
what a head costs. A recurrent head (`Recurrent`) takes the token drawn too, and goes on from its
own row and the token it guessed: guesses that know of each other are right more often (Ankner et
al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from octavo.executor.base import Float32, StepResult, slice_rows
from octavo.loader.base import Checkpoint, MadeRows, Weight
from octavo.loader.rounding import rounded
from octavo.models.config import Activation
from octavo.models.program import (
    Activate,
    Add,
    Embed,
    GatedActivation,
    Input,
    Linear,
    Logits,
    Op,
    Program,
)
from octavo.sampling.params import MIN_TEMPERATURE
from octavo.sampling.sampler import Sampler
from octavo.scheduler.batching import Scheduled
from octavo.scheduler.sequence import Sequence as Seq
from octavo.scheduler.sequence import Status
from octavo.spec_decode.drafter import NO_DRAFT, Draft, Target
from octavo.spec_decode.guess import Guess, draw_next, drawn
from octavo.spec_decode.heads import Heads, Recurrent

_LOGITS = "medusa.output"
_UNLIKELY = 0.15  # that all guesses of a draft are right: nothing is guessed behind it
_CLASSES = 15


def head_weights(heads: Heads, checkpoint: Checkpoint, threads: int = 1) -> dict[str, Weight]:
    """By role, all that the heads add to the target's weights: their matrices rounded to 8 bits,
    and the chosen rows of the logits matrix as they are.
    """
    given: dict[str, Weight] = {}
    if heads.recurrent is not None:
        given |= {f"medusa.{name}": weight for name, weight in heads.recurrent._asdict().items()}
    for at, layers in enumerate(heads.blocks):
        for number, layer in enumerate(layers):
            given[_role(at, number)] = layer.weight
            if layer.bias is not None:
                given[f"{_role(at, number)}.bias"] = layer.bias
    weights = rounded(replace(checkpoint, path=heads.path, weights=given), "int8", threads).weights
    weights[_LOGITS] = _rows_of(checkpoint.weights[checkpoint.config.head], heads.token_map)
    return weights


def head_programs(heads: Heads, target: Program) -> list[Program]:
    """From hidden rows to logits of ``token_map``: a head each, or the one recurrent head's, which
    takes tokens too.
    """
    if heads.recurrent is not None:
        return [_recurrent_program(heads.recurrent, target, len(heads.token_map))]
    programs = []
    width = target.config.hidden_size
    for at, layers in enumerate(heads.blocks):
        ops: list[Op] = [Input("x")]
        weights: dict[str, tuple[int, ...]] = {}
        for number, layer in enumerate(layers):
            role, bias = _role(at, number), None
            weights[role] = (width, width)
            if layer.bias is not None:
                bias = f"{role}.bias"
                weights[bias] = (width,)
            ops.append(Linear("x", role, "h", bias))
            ops.append(Activate("h", "h", Activation.SILU))
            ops.append(Add("x", "h", "x"))
        size = len(heads.token_map)
        programs.append(_to_logits(target, ops, {"x": width, "h": width}, weights, size))
    return programs


def _recurrent_program(head: Recurrent, target: Program, size: int) -> Program:
    inner, width = head.gate.shape
    embed = next(op for op in target.ops if isinstance(op, Embed))
    weights = {embed.weight: target.weights[embed.weight]}
    weights |= {f"medusa.{name}": weight.shape for name, weight in head._asdict().items()}
    ops: list[Op] = [
        Input("x"),
        Embed(embed.weight, "e", embed.scale),
        *(Linear("x", f"medusa.{name}", name) for name in ("gate", "up")),
        Linear("x", "medusa.skip", "skip", "medusa.bias"),
        *(Linear("e", f"medusa.{name}", name) for name in ("gate_token", "up_token", "skip_token")),
        *(Add(name, f"{name}_token", name) for name in ("gate", "up", "skip")),
        GatedActivation("gate", "up", "gate", Activation.SILU),
        Linear("gate", "medusa.down", "h"),
        Add("skip", "h", "x"),
    ]
    widths = dict.fromkeys(("gate", "gate_token", "up", "up_token"), inner)
    widths |= dict.fromkeys(("x", "e", "skip", "skip_token", "h"), width)
    return _to_logits(target, ops, widths, weights, size)


def _to_logits(
    target: Program,
    ops: list[Op],
    widths: dict[str, int],
    weights: dict[str, tuple[int, ...]],
    size: int,
) -> Program:
    """From x to logits, as the target goes."""
    last = target.ops[-1]
    assert isinstance(last, Logits)
    weights[_LOGITS] = (size, widths["x"])
    ops.append(Logits("x", _LOGITS, last.softcap))
    return Program(target.config, tuple(ops), widths, weights)


def _role(head: int, layer: int) -> str:
    return f"medusa.{head}.{layer}"


def _rows_of(matrix: Weight, rows: npt.NDArray[np.int32]) -> Weight:
    """Some rows of a matrix: the bytes of each are its own in every format."""

    def make(first: int, last: int) -> npt.NDArray[np.uint8]:
        parts = [matrix.rows(row, row + 1).reshape(-1) for row in rows[first:last].tolist()]
        return np.concatenate(parts)

    row_bytes = matrix.nbytes // matrix.shape[0]
    return matrix._replace(
        shape=(len(rows), matrix.shape[1]),
        source=MadeRows(len(rows), row_bytes, make),
        stored_as=None,
    )


def work_bytes(
    heads: Heads, target: Program, max_tokens: int, max_seqs: int, max_logits_rows: int
) -> int:
    """Bytes that drafting holds in the largest step beside the target's own."""
    model = target.config
    widest = max(sum(program.widths.values()) for program in head_programs(heads, target))
    beyond = max(0, widest - sum(target.widths.values()))  # activations share one place
    # Of the step, of each sequence, and of those that draft what goes in and what comes out.
    hidden = (max_logits_rows + 3 * max_seqs) * model.hidden_size
    drawing = min(max_seqs, slice_rows(max_logits_rows, model.vocab_size))
    # Among the whole vocabulary; and copies of the heads' own logits, for their chances.
    logits = drawing * (model.vocab_size + 3 * len(heads.token_map))
    return 4 * (beyond * max_tokens + hidden + logits)


class MedusaDrafter:
    """Implements `ModelDrafter`, for a target whose executor keeps the hidden rows of its steps;
    and `Eager`: the next drafts are made by a thread that has nothing to do while the step's tokens
    go out and the next step is put together.
    """

    def __init__(self, heads: Heads, target: Target) -> None:
        executor = target.executor
        weights = head_weights(heads, target.checkpoint, executor.threads)
        self._recurrent = heads.recurrent is not None
        self._programs = []
        for program in head_programs(heads, target.program):
            own = {role: weights.pop(role) for role in program.weights if role in weights}
            number = executor.add_program(
                program, own, keep_hidden=self._recurrent, ids=heads.token_map.tolist()
            )
            self._programs.append(number)
        self._count = heads.num_heads
        self._token_map = heads.token_map
        self._vocab_size = target.checkpoint.config.vocab_size
        self._executor = executor
        self._sampler = target.sampler
        self._rejection = target.rejection
        self._whole = np.empty((0, self._vocab_size), np.float32)  # all but `token_map` is -inf
        # Most steps are followed by no draft: of the last one as little as may be is done before it
        # is known whether another one is, and hidden rows are copied only for who drafts.
        self._last: tuple[Scheduled, Sequence[list[int]]] | None = None  # not in `_rows` yet
        self._hidden: Float32 | None = None  # of that step, in the executor's own memory
        self._rows: dict[Seq, int] = {}  # which of them a sequence's last token was drawn from
        self._counts: dict[Seq, int] = {}  # tokens asked for in the last step, of greedy drafts
        # Whose drafts are begun, and their places among these; None: none have been since the last
        # step.
        self._begun: dict[Seq, int] | None = None

    @property
    def begun(self) -> bool:
        """As `Eager` says."""
        return self._begun is not None

    def observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        self._begun = None
        self._counts.clear()
        self._last, self._hidden = (scheduled, runs), result.hidden
        if scheduled.drafts is not None:  # it may hold what they were drawn from, which is large
            self._find_rows()

    def begin(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        """As `Eager` says."""
        if self._counts and self._begin(scheduled, result, runs):
            self._counts.clear()
        else:
            self.observe(scheduled, result, runs)

    def _begin(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> bool:
        """Begins the next drafts of those who drafted; not where others may want their rows."""
        if scheduled.drafts is None or result.hidden is None:
            return False  # nothing was kept of the drafts: none follow, as a rule
        begun: dict[Seq, int] = {}
        most: list[int] = []
        rows: list[int] = []
        tokens: list[int] = []
        for at, (seq, run) in enumerate(zip(scheduled.samples, runs, strict=True)):
            if not run or seq.status is Status.FINISHED:
                continue
            left = seq.num_to_come - len(run) - 1  # beside the one that is drawn in any case
            if left <= 0:
                continue
            if seq not in self._counts:
                return False
            begun[seq] = len(rows)
            most.append(min(self._counts[seq], left))
            rows.append(scheduled.last_row(at, run))
            tokens.append(run[-1])
        if not rows:
            return False
        self._executor.start_draft(self._programs, result.hidden, rows, tokens, most, _UNLIKELY)
        self._begun = begun
        self._last = self._hidden = None
        self._rows.clear()
        return True

    def _find_rows(self) -> None:
        if self._last is None:
            return
        (scheduled, runs), self._last = self._last, None
        rows: Sequence[int] = scheduled.sample_rows
        if scheduled.drafts is not None:
            rows = [scheduled.last_row(at, run) if run else 0 for at, run in enumerate(runs)]
        self._rows = {
            seq: row
            for seq, row, run in zip(scheduled.samples, rows, runs, strict=True)
            if run and seq.status is not Status.FINISHED  # as the others of one that failed
        }

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        """As `ModelDrafter` says."""
        if self._begun is not None:
            return self._finish(self._begun, decoding, counts)
        self._find_rows()
        hidden, self._hidden = self._hidden, None  # a head puts rows of its own there
        drafts = [NO_DRAFT] * len(decoding)
        if hidden is None:
            return drafts
        plain: list[int] = []  # indices
        others: dict[int, Guess] = {}  # by index
        for index, (seq, count) in enumerate(zip(decoding, counts, strict=True)):
            if not count or seq not in self._rows:
                continue
            if _plain(seq):
                plain.append(index)
                self._counts[seq] = min(count, self._count)
            else:
                row = hidden[self._rows[seq]].copy()
                most = min(count, self._count)
                others[index] = Guess.begin(seq, most, probabilities=self._rejection, row=row)
        if plain:
            rows = hidden[[self._rows[decoding[index]] for index in plain]]
            self._likeliest(decoding, counts, plain, rows, drafts)
        if others:
            self._drawn(list(others.values()))
        for index, guess in others.items():
            drafts[index] = guess.draft()
        return drafts

    def give_up(self) -> None:
        """As `Eager` says."""
        self._begun = None
        self._executor.cancel_draft()

    def _finish(
        self, begun: dict[Seq, int], decoding: Sequence[Seq], counts: Sequence[int]
    ) -> list[Draft]:
        """The drafts that were begun, as far as they are wanted."""
        self._begun = None
        made = self._executor.finish_draft()
        drafts = [NO_DRAFT] * len(decoding)
        for index, (seq, count) in enumerate(zip(decoding, counts, strict=True)):
            at = begun.get(seq)
            if not count or at is None or made is None:
                continue
            self._counts[seq] = min(count, self._count)
            tokens, chance = made[at]
            if tokens:
                drafts[index] = Draft(tokens[:count], int(_CLASSES * chance))
        return drafts

    def _likeliest(
        self,
        decoding: Sequence[Seq],
        counts: Sequence[int],
        which: list[int],
        rows: Float32,
        drafts: list[Draft],
    ) -> None:
        """Drafts of those whose likeliest token is drawn, from ``rows``: in one call."""
        tokens, chances = self._executor.draft_rows(
            self._programs,
            rows,
            np.array([decoding[index].token_ids[-1] for index in which], np.int32),
            np.array([min(counts[index], self._count) for index in which], np.int32),
            _UNLIKELY,
        )
        lengths = (tokens >= 0).sum(axis=1).tolist()
        for index, row, length, (chance, *_) in zip(
            which, tokens.tolist(), lengths, chances.tolist(), strict=True
        ):
            if length:
                drafts[index] = Draft(row[:length], int(_CLASSES * chance))

    def _drawn(self, going: list[Guess]) -> None:
        """Makes guesses longer, a token at a time: each is drawn as the target will."""
        depth = 0
        while going:
            rows = np.stack([guess.row for guess in going if guess.row is not None])
            result = self.compute(depth, rows, [guess.last_token for guess in going])
            if result.hidden is not None:
                for guess, row in zip(going, result.hidden.copy(), strict=True):
                    guess.row = row
            going = draw_next(self._sampler, result, going, self._draw)
            going = [guess for guess in going if guess.chance > _UNLIKELY]
            depth += 1

    def compute(self, head: int, rows: Float32, tokens: Sequence[int]) -> StepResult:
        """Logits [sequences, token_map] and, of a recurrent head, the hidden rows that it goes on
        from.
        """
        if self._recurrent:
            token_ids = np.array(tokens, np.int32)
            return self._executor.execute_rows(self._programs[0], rows, token_ids)
        return self._executor.execute_rows(self._programs[head], rows)

    def _draw(
        self, sampler: Sampler, logits: Float32 | None, guesses: Sequence[Guess]
    ) -> list[int]:
        """As `drawn`, from logits [rows, token_map]; the other tokens cannot be drawn."""
        assert logits is not None
        chances = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
        for guess, chance in zip(guesses, chances.tolist(), strict=True):
            if not guess.token_ids:
                guess.evidence = int(_CLASSES * chance)
            guess.chance *= chance
        if len(self._whole) < len(guesses):
            self._whole = np.full((len(guesses), self._vocab_size), -np.inf, np.float32)
        whole = self._whole[: len(guesses)]
        whole[:, self._token_map] = logits
        return drawn(sampler, whole, guesses)

    def end(self, seq: Seq) -> None:
        self._find_rows()
        self._rows.pop(seq, None)
        self._counts.pop(seq, None)
        if self._begun is not None:
            self._begun.pop(seq, None)

    def close(self) -> None:
        self._last = self._hidden = None
        self._rows.clear()
        self._counts.clear()
        self._begun = None


def _plain(seq: Seq) -> bool:
    """Whether the likeliest token is drawn, whatever came before."""
    params = seq.owner.params
    return (
        params.temperature < MIN_TEMPERATURE
        and params.presence_penalty == params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
        and not params.logit_bias
        and params.allowed_token_ids is None
        and not params.banned_token_ids
    )
