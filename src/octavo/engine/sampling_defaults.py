"""Default sampling parameters: those that a model comes with.

``generation_config.json`` of a Hugging Face folder has it under transformers' names, a GGUF file in
keys that begin with ``general.sampling.``. As in vLLM, the values of `_NAMES` are the defaults of
requests; what else is there and would change the drawing is named in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.loader.base import Checkpoint, CheckpointError
from octavo.loader.files import json_object, read_file
from octavo.loader.hf_tokenizer import GENERATION
from octavo.sampling.params import InvalidParameter, SamplingParams

_MOST_BYTES = 4 << 20
# transformers' name: ours
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# These do not change how tokens are drawn here: ids that the tokenizer has, a switch that vLLM
# does not heed either, and how transformers itself computes.
_NO_SAMPLING = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
        *("do_sample", "transformers_version", "_from_model_config", "use_cache", "max_length"),
        *("cache_implementation", "return_dict_in_generate", "output_scores", "trust_remote_code"),
    }
)
VLLM = "vllm"  # instead of a folder: nothing but a request's own values and vLLM's defaults


def sampling_defaults(
    checkpoint: Checkpoint, setting: str = "auto", override: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], str]:
    """Return the defaults, which are fields of `SamplingParams`, and a line for the log that also
    names what is not supported; "" if there is nothing to say.

    They are from the model's own files (``setting`` "auto"), from nowhere ("vllm"), or from a
    folder's ``generation_config.json``. ``override`` replaces single values. Raise
    `CheckpointError` for values that cannot be used.
    """
    source, given = checkpoint.path.name, checkpoint.generation_config
    if checkpoint.path.is_dir():
        source = GENERATION
    if setting == VLLM:
        source, given = "", {}
    elif setting != "auto":
        path = Path(setting) / GENERATION
        source, given = str(path), json_object(path, read_file(path, _MOST_BYTES))
    if override:
        flag = "--override-generation-config"
        source = f"{source}, {flag}" if given else flag
        given = {**given, **override}
    given = {name: value for name, value in given.items() if value is not None}
    values = {ours: given[name] for name, ours in _NAMES.items() if name in given}
    try:
        SamplingParams(**values).validated(1 << 31)
    except InvalidParameter as error:
        hint = "" if setting == VLLM else f" (--generation-config {VLLM} leaves the file out)"
        raise CheckpointError(f"{source}: {error}{hint}") from None
    told = []
    if values:
        defaults = ", ".join(f"{name} {value:g}" for name, value in values.items())
        told.append(f"{defaults} where a request says nothing")
    if ignored := sorted(given.keys() - _NAMES.keys() - _NO_SAMPLING):
        told.append(f"not supported and not applied: {', '.join(ignored)}")
    return values, f"sampling defaults: {'; '.join(told)} ({source})" if told else ""
