"""Records what `transformers`' assistants of Gemma 4 say, of tiny random models.

Run by hand, in the environment of record_families.py:

    python tests/oracle/record_assistants.py [NAME ...]

The target is the base of families/NAME. It computes a part of the recorded ids, the last token of
them by itself, so that its sliding layers hand over what their windows see. The assistant then
drafts behind the next id. Keys and values are rounded to float16 as in record_families.py.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from oracle.assistant_folders import ASSISTANTS, LENGTHS, NAMES, write_assistant
from oracle.record_families import half_precision_cache, open_model
from oracle.tiny_folders import TEXT, Float32, folder, recorded

DRAFTS = 4
TARGETS_OWN = (  # of text_config
    *("vocab_size", "num_key_value_heads", "head_dim", "rope_parameters", "sliding_window"),
    *("max_position_embeddings", "rms_norm_eps", "hidden_activation"),
)


def config_of(target: Any) -> Any:
    """Six query heads where the target has four, on its KV heads."""
    theirs = target.to_dict()
    far = next(theirs["per_layer_config"].values().__iter__())
    types = ["sliding_attention", "full_attention", "full_attention"]
    text = transformers.Gemma4TextConfig(
        **{key: theirs[key] for key in TARGETS_OWN},
        hidden_size=24,
        intermediate_size=40,
        num_attention_heads=6,
        num_hidden_layers=3,
        num_kv_shared_layers=3,
        layer_types=types,
        per_layer_config={str(at): far for at, kind in enumerate(types) if kind == types[-1]},
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    )
    return transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=theirs["hidden_size"]
    )


def drafted(target: Any, assistant: Any, ids: list[int], length: int) -> Float32:
    """The assistant's logits, as SinglePositionMultiTokenCandidateGenerator has it draft."""
    before, last, token = (
        torch.tensor([part]) for part in (ids[: length - 1], [ids[length - 1]], [ids[length]])
    )
    cache = transformers.DynamicCache(config=target.config)
    target(input_ids=before, cache=cache, use_cache=True)
    made = target(
        input_ids=last,
        cache=cache,
        use_cache=True,
        output_hidden_states=True,
        return_shared_kv_states=True,
    )
    hidden, rows = made.hidden_states[-1], []
    for _ in range(DRAFTS):
        embedded = target.get_input_embeddings()(token)
        out = assistant(
            inputs_embeds=torch.cat([embedded, hidden], dim=-1),
            position_ids=torch.tensor([[length]]),
            shared_kv_states=dict(made.shared_kv_states),
            use_cache=False,
        )
        rows.append(out.logits[0, -1].numpy())
        hidden, token = out.last_hidden_state, out.logits.argmax(dim=-1)
    return np.stack(rows)


def record(name: str) -> None:
    ids = recorded(name).ids.tolist()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        target = open_model(folder(name, place / "target"))
        config = config_of(target.config.get_text_config())
        made = transformers.Gemma4AssistantForCausalLM(config)
        made.save_pretrained(place / "random")
        stored = load_file(place / "random" / "model.safetensors")
        shapes = {key: list(values.shape) for key, values in stored.items()}
        values = json.loads((place / "random" / "config.json").read_text())
        write_assistant(place / "assistant", values, shapes)
        assistant = transformers.Gemma4AssistantForCausalLM.from_pretrained(
            place / "assistant", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with half_precision_cache(target), torch.inference_mode():
            logits = np.stack([drafted(target, assistant, ids, length) for length in LENGTHS])
    ASSISTANTS.mkdir(exist_ok=True)
    path = ASSISTANTS / f"{name}.npz"
    meta = json.dumps({"config": values, "shapes": shapes})
    np.savez_compressed(path, logits=logits, meta=np.array(meta))
    heads = values[TEXT]["num_attention_heads"]
    print(f"{name}: {path.stat().st_size:,} bytes, {heads} heads, deviation {logits.std():.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Record transformers' assistants of Gemma 4.")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in parser.parse_args().names:
        record(name)


if __name__ == "__main__":
    main()
