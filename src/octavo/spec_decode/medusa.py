"""Drafts by heads on the target's last hidden state.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
2024. Head i, a residual block x + SiLU(W x + b), takes the hidden row that a token was drawn from
and guesses the token i + 1 places behind that token. All heads share the target's logits matrix, of
which only the rows of common tokens are read (Zhao et al., "FR-Spec", 2025): reading it is most of
what a head costs. A recurrent head also takes the token drawn, and goes on from
its own row and the token it guessed. Guesses that know of each other are right more often (Ankner
et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", 2024).
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
    Shapes,
)
from octavo.sampling.params import MIN_TEMPERATURE
from octavo.sampling.sampler import Sampler
from octavo.scheduler.batching import Scheduled
from octavo.scheduler.sequence import Sequence as Seq
from octavo.scheduler.sequence import Status
from octavo.spec_decode import tuning
from octavo.spec_decode.drafter import NO_DRAFT, Draft, ModelDrafter, Target
from octavo.spec_decode.heads import Heads
from octavo.spec_decode.partial_draft import PartialDraft, draw, extend

_LOGITS = "medusa.output"
_CLASSES = 15  # of evidence: how probable the heads find the first token


def head_weights(heads: Heads, checkpoint: Checkpoint, threads: int = 1) -> dict[str, Weight]:
    """Return by role all that the heads add to the target's weights: their matrices rounded to 8
    bits, and the chosen rows of the logits matrix unchanged.
    """
    given = {
        f"medusa.{name.removesuffix('.weight')}": weight for name, weight in heads.weights.items()
    }
    weights = rounded(replace(checkpoint, path=heads.path, weights=given), "int8", threads).weights
    weights[_LOGITS] = _rows_of(checkpoint.weights[checkpoint.config.head], heads.token_map)
    return weights


def head_programs(heads: Heads, target: Program) -> list[Program]:
    """Return the Programs from hidden rows to logits of ``token_map``: one per head, or the one of
    the recurrent head, which takes tokens too.
    """
    config, last = target.config, target.ops[-1]
    assert isinstance(last, Logits)
    width = config.hidden_size
    widths, parts = {"x": width, "h": width}, list[list[Op]]()
    if heads.recurrent:
        inner, names = heads.weights["gate.weight"].shape[0], ("gate", "up", "skip")
        embed = next(op for op in target.ops if isinstance(op, Embed))
        parts.append(
            [
                Embed(embed.weight, "e", embed.scale),
                Linear("x", "medusa.gate", "gate"),
                Linear("x", "medusa.up", "up"),
                Linear("x", "medusa.skip", "skip", "medusa.skip.bias"),
                *(Linear("e", f"medusa.{name}_token", f"{name}_token") for name in names),
                *(Add(name, f"{name}_token", name) for name in names),
                GatedActivation("gate", "up", "gate", Activation.SILU),
                Linear("gate", "medusa.down", "h"),
                Add("skip", "h", "x"),
            ]
        )
        widths |= dict.fromkeys(("gate", "gate_token", "up", "up_token"), inner)
        widths |= dict.fromkeys(("e", "skip", "skip_token"), width)
    for head in range(0 if heads.recurrent else heads.num_heads):
        parts.append([])
        for layer in range(heads.num_layers):
            name = f"blocks.{head}.layers.{layer}"
            bias = f"medusa.{name}.bias" if f"{name}.bias" in heads.weights else None
            parts[-1] += [
                Linear("x", f"medusa.{name}", "h", bias),
                Activate("h", "h", Activation.SILU),
                Add("x", "h", "x"),
            ]
    programs = []
    for ops in parts:
        weights: Shapes = {_LOGITS: (len(heads.token_map), width)}
        for op in ops:
            weights |= op.weight_shapes(widths, config)
        whole = Input("x"), *ops, Logits("x", _LOGITS, last.softcap)
        programs.append(Program(config, whole, widths, weights))
    return programs


def _rows_of(matrix: Weight, rows: npt.NDArray[np.int32]) -> Weight:
    """Return some rows of a matrix: in every format each row has bytes of its own."""

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
    """Return the bytes that drafting holds in the largest step beside the target's own."""
    model = target.config
    widest = max(sum(program.widths.values()) for program in head_programs(heads, target))
    beyond = max(0, widest - sum(target.widths.values()))  # activations share one place
    # Rows of the step, of each sequence, and what goes in and out for those that draft.
    hidden = (max_logits_rows + 3 * max_seqs) * model.hidden_size
    drawing = min(max_seqs, slice_rows(max_logits_rows, model.vocab_size))
    # Of the whole vocabulary; and copies of the heads' own logits, for their chances.
    logits = drawing * (model.vocab_size + 3 * len(heads.token_map))
    return 4 * (beyond * max_tokens + hidden + logits)


class MedusaDrafter(ModelDrafter):
    """Drafts for a target whose executor keeps the hidden rows of its steps.

    Greedy drafts may be begun early: a thread that has nothing to do makes them while the step's
    tokens go out and the next step is put together.
    """

    def __init__(self, heads: Heads, target: Target) -> None:
        executor = target.executor
        weights = head_weights(heads, target.checkpoint, executor.threads)
        self._heads = heads
        self._programs = []
        for program in head_programs(heads, target.program):
            own = {role: weights.pop(role) for role in program.weights if role in weights}
            number = executor.add_program(
                program, own, keep_hidden=heads.recurrent, ids=heads.token_map.tolist()
            )
            self._programs.append(number)
        self._vocab_size = target.checkpoint.config.vocab_size
        self._executor = executor
        self._sampler = target.sampler
        self._rejection = target.rejection
        self._whole = np.empty((0, self._vocab_size), np.float32)  # all but `token_map` is -inf
        self._hidden: Float32 | None = None  # of the last step, in the executor's own memory
        self._rows: dict[Seq, int] = {}  # the hidden row that a sequence's last token came from
        self._counts: dict[Seq, int] = {}  # tokens asked for in the last step, of greedy drafts
        self._begun: dict[Seq, int] | None = None  # the places of the drafts that were begun

    @property
    def begun(self) -> bool:
        """As `ModelDrafter` says."""
        return self._begun is not None

    def observe(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        self._begun = None
        self._counts = {}
        self._hidden = result.hidden
        self._rows = {
            seq: scheduled.last_row(index, run)
            for index, (seq, run) in enumerate(zip(scheduled.samples, runs, strict=True))
            if run and seq.status is not Status.FINISHED  # as the others of one that failed
        }

    def begin(self, scheduled: Scheduled, result: StepResult, runs: Sequence[list[int]]) -> None:
        """Begin the next drafts of those who drafted, unless others may want drafts too."""
        counts = self._counts
        self.observe(scheduled, result, runs)
        most: dict[Seq, int] = {}
        tokens: list[int] = []
        for seq, run in zip(scheduled.samples, runs, strict=True):
            left = seq.num_to_come - len(run) - 1  # beside the token that is drawn in any case
            if seq not in self._rows or left <= 0:
                continue
            if seq not in counts:
                return
            most[seq] = min(counts[seq], left)
            tokens.append(run[-1])
        self._start(most, tokens)

    def propose(self, decoding: Sequence[Seq], counts: Sequence[int]) -> list[Draft]:
        """As `ModelDrafter` says."""
        asked = {
            seq: min(count, self._heads.num_heads)
            for seq, count in zip(decoding, counts, strict=True)
            if count
        }
        drawing: list[PartialDraft] = []
        hidden = self._hidden
        if self._begun is None and hidden is not None:
            known = {seq: count for seq, count in asked.items() if seq in self._rows}
            greedy = {seq: count for seq, count in known.items() if _likeliest(seq)}
            drawing = [
                PartialDraft(
                    seq, count, probabilities=self._rejection, row=hidden[self._rows[seq]].copy()
                )
                for seq, count in known.items()
                if seq not in greedy
            ]
            self._start(greedy, [seq.token_ids[-1] for seq in greedy])
            self._hidden = None  # a head writes rows of its own there
        drafts = self._finish(asked)
        self._draw(drawing)
        drafts |= {draft.seq: draft.draft() for draft in drawing}
        return [drafts.get(seq, NO_DRAFT) for seq in decoding]

    def _start(self, most: dict[Seq, int], tokens: list[int]) -> None:
        """Begin drafts of sequences that draw the likeliest token, behind their last ``tokens``."""
        if not most or self._hidden is None:
            return
        rows, counts = [self._rows[seq] for seq in most], [*most.values()]
        self._executor.start_draft(
            self._programs, self._hidden, rows, tokens, counts, tuning.HEADS_LEAST_CHANCE
        )
        self._begun = {seq: place for place, seq in enumerate(most)}
        self._hidden, self._rows = None, {}

    def _finish(self, asked: dict[Seq, int]) -> dict[Seq, Draft]:
        """Return the drafts that were begun, as far as they are asked for."""
        begun, self._begun = self._begun, None
        made = None if begun is None else self._executor.finish_draft()
        if begun is None or made is None:  # it was cancelled
            return {}
        self._counts = {seq: count for seq, count in asked.items() if seq in begun}
        drafts = {}
        for seq, count in self._counts.items():
            tokens, chance = made[begun[seq]]
            drafts[seq] = Draft(tokens[:count], int(_CLASSES * max(0.0, chance)))
        return drafts

    def cancel(self) -> None:
        self._begun = None
        self._executor.cancel_draft()

    def _draw(self, going: list[PartialDraft]) -> None:
        """Draw the tokens of the drafts one by one, each as the target will."""
        depth = 0
        while going:
            rows = np.stack([draft.row for draft in going if draft.row is not None])
            result = self.compute(depth, rows, [draft.last_token for draft in going])
            if result.hidden is not None:
                for draft, row in zip(going, result.hidden.copy(), strict=True):
                    draft.row = row
            going = extend(self._sampler, result, going, self._draw_mapped)
            going = [draft for draft in going if draft.chance > tuning.HEADS_LEAST_CHANCE]
            depth += 1

    def compute(self, head: int, rows: Float32, tokens: Sequence[int]) -> StepResult:
        """Return logits [sequences, token_map] and, of a recurrent head, the hidden rows that it
        goes on from.
        """
        if self._heads.recurrent:
            token_ids = np.array(tokens, np.int32)
            return self._executor.execute_rows(self._programs[0], rows, token_ids)
        return self._executor.execute_rows(self._programs[head], rows)

    def _draw_mapped(
        self, sampler: Sampler, logits: Float32 | None, drafts: Sequence[PartialDraft]
    ) -> list[int]:
        """As `draw`, from logits [rows, token_map]; other tokens cannot be drawn."""
        assert logits is not None
        chances = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
        for draft, chance in zip(drafts, chances.tolist(), strict=True):
            if not draft.token_ids:
                draft.evidence = int(_CLASSES * chance)
            draft.chance *= chance
        if len(self._whole) < len(drafts):
            self._whole = np.full((len(drafts), self._vocab_size), -np.inf, np.float32)
        whole = self._whole[: len(drafts)]
        whole[:, self._heads.token_map] = logits
        return draw(sampler, whole, drafts)

    def end(self, seq: Seq) -> None:
        self._rows.pop(seq, None)
        self._counts.pop(seq, None)
        if self._begun is not None:
            self._begun.pop(seq, None)

    def close(self) -> None:
        self._hidden, self._rows, self._counts, self._begun = None, {}, {}, None


def _likeliest(seq: Seq) -> bool:
    """Return whether the sequence draws the likeliest token, whatever came before."""
    params = seq.owner.params
    return (
        params.temperature < MIN_TEMPERATURE
        and params.presence_penalty == params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
        and not params.logit_bias
        and params.allowed_token_ids is None
        and not params.banned_token_ids
    )
