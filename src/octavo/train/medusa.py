"""Medusa heads, learned from what the model itself says (self-distillation: Cai et al., 2024).

The head numbered i learns, at every place of an answer, the token i + 1 places behind the one drawn
there. With ``hydra`` (Ankner et al., 2024) it starts from the head before it and is given the token
before the one it guesses; in training these are the answer's own (teacher forcing).
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import Checkpoint
from octavo.engine.load import SettingsError
from octavo.model.families import program
from octavo.model.program import Embed
from octavo.quant.blocks import dequantize
from octavo.quant.layouts import Tensor
from octavo.quant.safetensors_writer import SafetensorsWriter
from octavo.quant.state import write_whole
from octavo.speculate.heads import CONFIG, MOST_HEADS, MOST_LAYERS, fingerprint
from octavo.train.texts import Texts

_WARM_UP = 50  # steps
_LARGEST_GRADIENT = 1.0
_HELD_OUT = 20  # one answer of so many is measured on, and not learned from

Float32 = npt.NDArray[np.float32]
Progress = Callable[[str], None]
Torch = Any  # a tensor of torch, which is there only where something is trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How heads are made. Raises `SettingsError`."""

    heads: int = 4
    layers: int = 1
    hydra: bool = True
    vocabulary: int = 8192  # tokens that are guessed, at most: the commonest of the answers
    epochs: float = 2.0
    learning_rate: float = 1e-3
    decay: float = 0.9  # of a head's weight in the loss, from one to the next
    soft: float = 0.5  # share of the loss against the model's own distribution, not its tokens
    batch: int = 1024  # places
    seed: int = 0

    def __post_init__(self) -> None:
        for name, high in (("heads", MOST_HEADS), ("layers", MOST_LAYERS)):
            if not 1 <= getattr(self, name) <= high:
                raise SettingsError(f"{name} is {getattr(self, name)}, outside 1 to {high}")
        if self.vocabulary < 2:
            raise SettingsError(f"vocabulary is {self.vocabulary}, below 2")
        if self.epochs <= 0:
            raise SettingsError(f"epochs is {self.epochs}, not above 0")


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
            "training needs PyTorch, which is not installed: pip install 'octavo[train]'"
        ) from None


def common_tokens(texts: Texts, most: int) -> npt.NDArray[np.int64]:
    """The ``most`` commonest tokens of the answers, of equals those that come first; ascending."""
    follows = np.ones(len(texts.tokens), np.bool_)
    follows[0] = False  # a prompt's last token is no answer's
    follows[1:] = texts.left[:-1] > 0
    counts = np.bincount(texts.tokens[follows])
    chosen = np.argsort(-counts, kind="stable")[:most]
    return np.sort(chosen[counts[chosen] > 0]).astype(np.int64)


def learn(
    checkpoint: Checkpoint, texts: Texts, recipe: Recipe, threads: int, progress: Progress
) -> Learned:
    """Deterministic for one number of threads. Raises `SettingsError` for too little text."""
    torch = import_torch()
    held_out = max(1, texts.num_answers // _HELD_OUT)
    if texts.num_answers < 2:
        raise SettingsError("there is nothing to train with: fewer than two answers")
    texts, held = texts.split(held_out)
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
        model = _Model(checkpoint, token_map, recipe)
        began = time.monotonic()
        model.fit(texts, places, progress)
        seconds = time.monotonic() - began
        rates = model.measure(held)
    finally:
        torch.set_num_threads(before)
    inside = np.isin(texts.tokens, token_map)
    report = {
        "answers": texts.num_answers + held.num_answers,
        "tokens": len(texts.tokens) + len(held.tokens),
        "vocabulary": len(token_map),
        "vocabulary_covers": round(float(inside.mean()), 4),
        "training_seconds": round(seconds, 1),
        **rates,
    }
    return Learned(model.tensors(), token_map, report)


class _Model:
    """The heads, the logits rows and the embedding in torch."""

    def __init__(
        self, checkpoint: Checkpoint, token_map: npt.NDArray[np.int64], recipe: Recipe
    ) -> None:
        torch = import_torch()
        self.recipe = recipe
        self.torch = torch
        config = checkpoint.config
        target = program(config)
        embed = next(op for op in target.ops if isinstance(op, Embed))
        head = "token_embd" if config.tied_embeddings else "output"
        embedding = dequantize(checkpoint.weights["token_embd"]) * np.float32(embed.scale)
        # Brought to one in the mean square while they are learned with: the matrices get the rest.
        self.scale = float(1 / np.sqrt(np.square(embedding, dtype=np.float64).mean()))
        self.embedding = torch.from_numpy(embedding * np.float32(self.scale))
        rows = dequantize(checkpoint.weights[head])[token_map]
        self.rows = torch.from_numpy(np.ascontiguousarray(rows)).to(torch.bfloat16)
        self.token_map = torch.from_numpy(token_map)
        self.number = torch.full((config.vocab_size,), -100)
        self.number[self.token_map] = torch.arange(len(token_map))
        width = config.hidden_size
        generator = torch.Generator().manual_seed(recipe.seed)
        self.generator = generator
        self.weights: dict[str, Torch] = {}
        for at in range(recipe.heads):
            for layer in range(recipe.layers):
                # A head begins as the one before it, and the first as the model's own.
                self.weights[f"blocks.{at}.layers.{layer}.weight"] = torch.zeros(width, width)
                self.weights[f"blocks.{at}.layers.{layer}.bias"] = torch.zeros(width)
            if recipe.hydra:
                noise = torch.randn(width, width, generator=generator)
                self.weights[f"blocks.{at}.token.weight"] = 0.01 * noise
        for weight in self.weights.values():
            weight.requires_grad_()

    def head(self, at: int, x: Torch, tokens: Torch) -> Torch:
        """x [places, hidden] → [places, hidden]."""
        functional = self.torch.nn.functional
        for layer in range(self.recipe.layers):
            name = f"blocks.{at}.layers.{layer}"
            inner = functional.linear(
                x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
            )
            if self.recipe.hydra and layer == 0:
                embedded = self.embedding[tokens]
                inner = inner + functional.linear(
                    embedded, self.weights[f"blocks.{at}.token.weight"]
                )
            x = x + functional.silu(inner)
        return x

    def heads(self, hidden: Torch, before: list[Torch]) -> Iterator[Torch]:
        """``before`` [places] of each head: the token before the one it guesses."""
        x = hidden
        for at in range(self.recipe.heads):
            out = self.head(at, x, before[at])
            if self.recipe.hydra:
                x = out
            yield out

    def logits(self, x: Torch) -> Torch:
        """[places, token_map]; rounded to bf16, whose products CPUs may have in hardware."""
        return (x.to(self.torch.bfloat16) @ self.rows.T).float()

    def fit(self, texts: Texts, places: npt.NDArray[np.int64], progress: Progress) -> None:
        torch, recipe = self.torch, self.recipe
        functional = torch.nn.functional
        beyond = recipe.heads + 1
        tokens = torch.from_numpy(np.pad(texts.tokens, (0, beyond)).astype(np.int64))
        left = torch.from_numpy(texts.left)
        hidden = torch.from_numpy(np.pad(texts.hidden, ((0, beyond), (0, 0))))
        batch = min(recipe.batch, len(places))
        steps = max(1, round(recipe.epochs * len(places) / batch))
        optimizer = torch.optim.AdamW(
            self.weights.values(), recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        order: Torch | None = None
        at = 0
        began = time.monotonic()
        for step in range(steps):
            if order is None or at + batch > len(places):
                order, at = torch.randperm(len(places), generator=self.generator), 0
            here = torch.from_numpy(places)[order[at : at + batch]]
            at += batch
            rate = min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + np.cos(np.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * rate
            loss = torch.zeros(())
            before = [tokens[here + 1 + head] for head in range(recipe.heads)]
            for head, x in enumerate(self.heads(hidden[here].float(), before)):
                wanted = torch.where(
                    left[here] >= head + 2, self.number[tokens[here + 2 + head]], -100
                )
                logits = self.logits(x)
                weight = recipe.decay**head
                hard = functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
                hard = hard / (wanted >= 0).sum().clamp(min=1)
                loss = loss + weight * (1 - recipe.soft) * hard
                if recipe.soft:
                    known = left[here] >= head + 2
                    with torch.no_grad():
                        own = functional.softmax(self.logits(hidden[here + 1 + head].float()), -1)
                    cross = -(own * functional.log_softmax(logits, -1)).sum(-1)
                    soft = (cross * known).sum() / known.sum().clamp(min=1)
                    loss = loss + weight * recipe.soft * soft
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.weights.values(), _LARGEST_GRADIENT)
            optimizer.step()
            seconds = (time.monotonic() - began) / (step + 1) * (steps - step - 1)
            progress(f"step {step + 1} of {steps}, loss {loss.item():.3f}, {seconds:.0f} s left")

    def measure(self, texts: Texts) -> dict[str, Any]:
        """On answers not learned from: how often each head is right, of all places and of those
        where the heads before it were; and tokens a pass, decoding with drafts of all heads.
        """
        torch, count = self.torch, self.recipe.heads
        with torch.inference_mode():
            left = torch.from_numpy(texts.left)
            here = torch.nonzero(left >= 2).flatten()
            tokens = torch.from_numpy(np.pad(texts.tokens, (0, count + 1)).astype(np.int64))
            x = torch.from_numpy(texts.hidden)[here].float()
            token = tokens[here + 1]
            alive = torch.ones(len(here), dtype=torch.bool)
            accepted = torch.zeros(len(here), dtype=torch.long)
            top1, conditional = [], []
            for head in range(count):
                out = self.head(head, x, token)
                x = out if self.recipe.hydra else x
                token = self.token_map[self.logits(out).argmax(-1)]
                told = left[here] >= head + 2
                right = (token == tokens[here + 2 + head]) & told
                top1.append(_share(right.sum(), told.sum()))
                conditional.append(_share((right & alive).sum(), (alive & told).sum()))
                alive = alive & right
                accepted += alive
        passes = produced = 0
        following = -1
        for place, extra in zip(here.tolist(), accepted.tolist(), strict=True):
            if place < following and texts.left[place] < texts.left[place - 1]:
                continue
            passes += 1
            produced += 1 + extra
            following = place + 1 + extra
        return {
            "top1": top1,
            "top1_if_right_before": conditional,
            "tokens_per_pass": round(produced / max(1, passes), 3),
        }

    def tensors(self) -> dict[str, Float32]:
        found: dict[str, Float32] = {}
        for name, weight in self.weights.items():
            values: Float32 = weight.detach().numpy()
            if name.endswith("token.weight"):
                values = values * np.float32(self.scale)
            found[name] = values
        return found


def _share(part: Any, whole: Any) -> float:
    return round(float(part) / max(1, int(whole)), 4)


def write(folder: Path, checkpoint: Checkpoint, learned: Learned, recipe: Recipe) -> int:
    """Heads as speculate/heads.py reads them; returns the bytes of all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = SafetensorsWriter(folder, len(learned.tensors) + 1)
    try:
        for name, values in learned.tensors.items():
            writer.add(name, Tensor("F16", values.astype(np.float16)))
        writer.add("token_map", Tensor("I64", learned.token_map))
        size = writer.finish()
    except BaseException:
        writer.discard()
        raise
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": checkpoint.config.hidden_size,
        "vocab_size": checkpoint.config.vocab_size,
        "truncated_vocab_size": len(learned.token_map),
        "medusa_num_heads": recipe.heads,
        "medusa_num_layers": recipe.layers,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "hydra": recipe.hydra,
        "target": fingerprint(checkpoint),
        "training": {"recipe": asdict(recipe), "held_out": learned.report},
    }
    write_whole(folder / CONFIG, json.dumps(config, indent=2).encode())
    return size
