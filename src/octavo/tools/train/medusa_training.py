"""Medusa heads, learned from what the model itself says (self-distillation: Cai et al., 2024).

Head i of Medusa's learns, at every place of an answer, the token i + 1 places behind the one drawn
there. A recurrent head learns first to guess the next hidden row from a row and the token drawn,
beginning with the best linear guess (rows say more than tokens: Li et al., "EAGLE", 2024), then the
tokens, going on from its own guesses with the answer's tokens (teacher forcing). Both learn the
model's own distribution beside the token it drew (distillation: Hinton et al., 2015).
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.engine.config import SettingsError
from octavo.extras import install_command
from octavo.loader.base import Checkpoint
from octavo.loader.dequantize import dequantize
from octavo.models.families import program
from octavo.models.program import Embed
from octavo.spec_decode.heads import MOST_HEADS, MOST_LAYERS, MOST_WIDTH
from octavo.tools.train.measure import Int, measure
from octavo.tools.train.texts import Texts

_WARM_UP = 50  # steps
_LARGEST_GRADIENT = 1.0
_SAMPLE = 4096  # places that scales are measured on
_MOST_SQUARES = 64  # batches of places that the linear guess is fitted to
_RIDGE = 1e-4
# One answer of so many is measured on, and not learned from. Odd, so that it meets greedy and
# sampled answers alike, each fourth of which is (tools/train/texts.py).
_HELD_OUT = 21

Float32 = npt.NDArray[np.float32]
Progress = Callable[[str], None]
Torch = Any  # a tensor of torch, which is there only where something is trained


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecipe:
    """How heads are made. Raises `SettingsError`."""

    heads: int = 3  # tokens guessed, one behind the other
    recurrent: bool = True  # one head that goes on from itself, or Medusa's, a head a token
    width: int = 768  # of a recurrent head
    layers: int = 1  # of Medusa's heads
    vocabulary: int = 4096  # tokens that are guessed, at most: the commonest of the answers
    row_epochs: float = 0.5  # learning to guess hidden rows, as a recurrent head does first …
    epochs: float = 2.0  # … and tokens
    learning_rate: float = 1e-3
    decay: float = 0.9  # of a head's weight in the loss, from one to the next
    soft: float = 0.9  # share of the loss against the model's own distribution, not its tokens
    batch: int = 1024  # places
    seed: int = 0

    def __post_init__(self) -> None:
        for name, high in (("heads", MOST_HEADS), ("layers", MOST_LAYERS), ("width", MOST_WIDTH)):
            if not 1 <= getattr(self, name) <= high:
                raise SettingsError(f"{name} is {getattr(self, name)}, outside 1 to {high}")
        if self.vocabulary < 2:
            raise SettingsError(f"vocabulary is {self.vocabulary}, below 2")
        for name in ("epochs", "row_epochs", "learning_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise SettingsError(f"{name} is {getattr(self, name)}, not a number from 0 on")


class Learned(NamedTuple):
    """Matrices [hidden, hidden] and biases by their names in the file, and how good they are."""

    tensors: dict[str, Float32]
    token_map: npt.NDArray[np.int64]
    report: dict[str, Any]


def import_torch() -> Any:
    """Raises `SettingsError` saying how to have it."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise SettingsError(
            f"training needs PyTorch, which is not installed: {install_command('train')}"
        ) from None


def common_tokens(texts: Texts, most: int) -> npt.NDArray[np.int64]:
    """The ``most`` commonest tokens of the answers, of equals those that come first; ascending."""
    counts = np.bincount(texts.drawn)
    chosen = np.argsort(-counts, kind="stable")[:most]
    return np.sort(chosen[counts[chosen] > 0]).astype(np.int64)


def learn(
    checkpoint: Checkpoint,
    texts: Texts,
    recipe: HeadRecipe,
    threads: int,
    progress: Progress,
    asked: Texts | None = None,
) -> Learned:
    """Deterministic for one number of threads. ``asked`` is measured on, too. Raises
    `SettingsError` for too little text.
    """
    torch = import_torch()
    if texts.num_answers < 2:
        raise SettingsError("there is nothing to train with: fewer than two answers")
    texts, held = texts.split(_HELD_OUT)
    places = np.flatnonzero(texts.left >= 2)
    token_map = common_tokens(texts, recipe.vocabulary)
    if len(places) < recipe.batch // 16 or len(token_map) < 2:
        raise SettingsError(
            f"there is too little to train with: {len(places)} places of the answers have tokens "
            f"behind them, of which {len(token_map)} are different"
        )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = _Model(checkpoint, texts, places, token_map, recipe)
        model.fit(progress)
        rates = measure(held, model.guess)
        if asked is not None:
            rates["measured_on"] = measure(asked, model.guess)
    finally:
        torch.set_num_threads(before)
    inside = np.isin(held.drawn, token_map)
    report = {
        "answers": texts.num_answers + held.num_answers,
        "tokens": len(texts.tokens) + len(held.tokens),
        "vocabulary": len(token_map),
        "vocabulary_covers": round(float(inside.mean()), 4),
        **rates,
    }
    return Learned(model.tensors(), token_map, report)


class _Model:
    """The heads, the logits rows and the embedding in torch."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        texts: Texts,
        places: npt.NDArray[np.int64],
        token_map: npt.NDArray[np.int64],
        recipe: HeadRecipe,
    ) -> None:
        torch = self.torch = import_torch()
        self.recipe = recipe
        config = checkpoint.config
        embed = next(op for op in program(config).ops if isinstance(op, Embed))
        embedding = dequantize(checkpoint.weights["token_embd"]) * np.float32(embed.scale)
        sample = texts.hidden[places[:_SAMPLE]].astype(np.float64)
        # Rows and embeddings are brought to one in the mean square while they are learned with, and
        # the matrices get the rest.
        self.row_scale = float(1 / np.sqrt(np.square(sample).mean()))
        self.token_scale = float(1 / np.sqrt(np.square(embedding, dtype=np.float64).mean()))
        self.embedding = torch.from_numpy(embedding * np.float32(self.token_scale))
        rows = dequantize(checkpoint.weights[config.head])[token_map] / np.float32(self.row_scale)
        self.rows = torch.from_numpy(np.ascontiguousarray(rows)).to(torch.bfloat16)
        self.metric = _logit_metric(torch, torch.from_numpy(rows))
        self.token_map = torch.from_numpy(token_map)
        self.number = torch.full((config.vocab_size,), -100)
        self.number[self.token_map] = torch.arange(len(token_map))
        beyond = recipe.heads + 1
        self.tokens = torch.from_numpy(np.pad(texts.tokens, (0, beyond)).astype(np.int64))
        self.left = torch.from_numpy(texts.left)
        self.hidden = torch.from_numpy(np.pad(texts.hidden, ((0, beyond), (0, 0))))
        self.places = torch.from_numpy(places)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.weights = self._first_weights(config.hidden_size)
        for weight in self.weights.values():
            weight.requires_grad_()

    def _first_weights(self, width: int) -> dict[str, Torch]:
        torch, recipe, inner = self.torch, self.recipe, self.recipe.width
        if not recipe.recurrent:
            # A head begins as the model's own.
            return {
                f"blocks.{head}.layers.{layer}.{name}": torch.zeros(shape)
                for head in range(recipe.heads)
                for layer in range(recipe.layers)
                for name, shape in (("weight", (width, width)), ("bias", (width,)))
            }

        def noise(rows: int, columns: int, size: float) -> Torch:
            return torch.randn(rows, columns, generator=self.generator) * size / columns**0.5

        names = ("gate", "gate_token", "up", "up_token")
        weights = {f"{name}.weight": noise(inner, width, 0.5) for name in names}
        weights["down.weight"] = noise(width, inner, 0.1)
        return weights | self._least_squares(width)

    def _least_squares(self, width: int) -> dict[str, Torch]:
        """The best linear guess at the next hidden row, in closed form."""
        torch = self.torch
        size = 2 * width + 1
        square, product = torch.zeros(size, size), torch.zeros(size, width)
        for here in self.places[: _MOST_SQUARES * self.recipe.batch].split(8192):
            ones = torch.ones(len(here), 1)
            x = torch.cat((self.row(here), self.embedding[self.tokens[here + 1]], ones), 1)
            square += x.T @ x
            product += x.T @ self.row(here + 1)
        square += torch.eye(size) * square.diagonal().mean() * _RIDGE
        found = torch.linalg.solve(square, product)
        return {
            "skip.weight": found[:width].T.contiguous(),
            "skip_token.weight": found[width:-1].T.contiguous(),
            "skip.bias": found[-1].clone(),
        }

    def row(self, places: Torch) -> Torch:
        """Hidden rows, scaled."""
        return self.hidden[places].float() * self.row_scale

    def head(self, at: int, x: Torch, tokens: Torch) -> Torch:
        """x [places, hidden] → [places, hidden]: of a head of that number, or the recurrent one."""
        weights, linear = self.weights, self.torch.nn.functional.linear
        silu = self.torch.nn.functional.silu
        if self.recipe.recurrent:
            e = self.embedding[tokens]

            def both(name: str) -> Torch:
                return linear(x, weights[f"{name}.weight"]) + linear(
                    e, weights[f"{name}_token.weight"]
                )

            inner = silu(both("gate")) * both("up")
            return linear(inner, weights["down.weight"]) + both("skip") + weights["skip.bias"]
        for layer in range(self.recipe.layers):
            name = f"blocks.{at}.layers.{layer}"
            inner = linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
            # Of the row as it is: what SiLU makes of it depends on the scale.
            x = x + silu(inner) * self.row_scale
        return x

    def guesses(self, hidden: Torch, before: Callable[[int], Torch]) -> Iterator[Torch]:
        """A row for each token that is guessed; ``before``: the tokens before the one."""
        x = hidden
        for at in range(self.recipe.heads):
            out = self.head(at, x, before(at))
            if self.recipe.recurrent:
                x = out
            yield out

    def logits(self, x: Torch) -> Torch:
        """[places, token_map]; rounded to bf16, whose products CPUs may have in hardware."""
        return (x.to(self.torch.bfloat16) @ self.rows.T).float()

    def fit(self, progress: Progress) -> None:
        if self.recipe.recurrent:
            self._descend("rows", self.recipe.row_epochs, self._row_loss, progress)
        self._descend("tokens", self.recipe.epochs, self._token_loss, progress)

    def _descend(
        self, name: str, epochs: float, loss_at: Callable[[Torch], Torch], progress: Progress
    ) -> None:
        """AdamW, with a rate that rises and falls."""
        torch, recipe = self.torch, self.recipe
        batch = min(recipe.batch, len(self.places))
        steps = round(epochs * len(self.places) / batch)
        parameters = list(self.weights.values())
        optimizer = torch.optim.AdamW(
            parameters, recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        order: Torch | None = None
        at = 0
        began = time.monotonic()
        for step in range(steps):
            if order is None or at + batch > len(order):
                order = self.places[torch.randperm(len(self.places), generator=self.generator)]
                at = 0
            rate = min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * rate
            loss = loss_at(order[at : at + batch])
            at += batch
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, _LARGEST_GRADIENT)
            optimizer.step()
            seconds = (time.monotonic() - began) / (step + 1) * (steps - step - 1)
            progress(
                f"{name}: step {step + 1} of {steps}, loss {loss.item():.4f}, {seconds:.0f} s left"
            )

    def _row_loss(self, here: Torch) -> Torch:
        """How far the guess at the next row is from it, as the logits see it."""
        torch = self.torch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.head(0, self.row(here), self.tokens[here + 1])
        off = (x.float() - self.row(here + 1)) @ self.metric
        return torch.nn.functional.smooth_l1_loss(off, torch.zeros_like(off))

    def _token_loss(self, here: Torch) -> Torch:
        """Cross-entropy, with the tokens and the model's own distribution, over all heads."""
        torch, recipe = self.torch, self.recipe
        functional = torch.nn.functional
        loss = torch.zeros(())
        rows = self.guesses(self.row(here), lambda at: self.tokens[here + 1 + at])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs = [out.float() for out in rows]
        places = torch.arange(len(here))
        for at, out in enumerate(outs):
            known = self.left[here] >= at + 2
            wanted = torch.where(known, self.number[self.tokens[here + 2 + at]], -100)
            with torch.no_grad():
                # Both cross-entropies are one, against a sum of distributions.
                target = functional.softmax(self.logits(self.row(here + 1 + at)), -1)
                target *= (recipe.soft * known / known.sum().clamp(min=1))[:, None]
                hits = wanted >= 0
                target[places[hits], wanted[hits]] += (1 - recipe.soft) / max(1, int(hits.sum()))
                mass = target.sum(-1)
            logits = self.logits(out)
            cross = (mass * logits.logsumexp(-1)).sum() - (target * logits).sum()
            loss = loss + recipe.decay**at * cross
        return loss

    def guess(self, hidden: npt.NDArray[np.float16], drawn: Int) -> Int:
        """The likeliest tokens [heads, places] behind those ``drawn`` from the rows."""
        torch = self.torch
        with torch.inference_mode():
            tokens = [torch.from_numpy(drawn.astype(np.int64))]
            rows = torch.from_numpy(hidden).float() * self.row_scale
            for out in self.guesses(rows, tokens.__getitem__):
                tokens.append(self.token_map[self.logits(out).argmax(-1)])
            found: Int = torch.stack(tokens[1:]).numpy()
        return found

    def tensors(self) -> dict[str, Float32]:
        """The weights for rows and embeddings as they are."""
        found: dict[str, Float32] = {}
        for name, weight in self.weights.items():
            values: Float32 = weight.detach().numpy()
            if name.endswith("_token.weight"):
                values = values * np.float32(self.token_scale)
            elif name.startswith(("gate", "up", "blocks")) and name.endswith("weight"):
                values = values * np.float32(self.row_scale)
            if name.startswith(("down", "skip_token")) or name == "skip.bias":
                values = values / np.float32(self.row_scale)
            found[name] = values
        return found


def _logit_metric(torch: Any, rows: Torch) -> Torch:
    """A factor [hidden, hidden] of the covariance of logits: a row times it is as long as the
    logits that the row makes vary, to a constant.
    """
    centred = rows - rows.mean(0)
    square = centred.T @ centred / len(rows)
    square += torch.eye(len(square)) * square.diagonal().mean() * 1e-5
    return torch.linalg.cholesky(square)
