"""How a request wants its tokens chosen, and when it wants to stop."""

from __future__ import annotations

from dataclasses import dataclass, field


class InvalidParameter(ValueError):
    """A request field that cannot be honoured; ``param`` is its name in the API."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Names, defaults and order of application follow vLLM.

    logits → allowed/banned tokens → logit_bias → min_tokens (no stop token before it)
    → repetition, frequency, presence penalties → temperature → min_p → top_k → top_p → draw.

    Logprobs are of the model's own distribution, before any of these.
    """

    n: int = 1
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 or -1 = all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # generated tokens only
    frequency_penalty: float = 0.0  # generated tokens only
    repetition_penalty: float = 1.0  # prompt and generated tokens
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # None: drawn at admission, and then fixed for the request
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives besides the chosen token
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
